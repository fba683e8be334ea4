-- Router replay: share of a step's tokens whose experts the trainer would have chosen differently from the engine.

ALTER TABLE train_steps ADD COLUMN out_of_route DOUBLE;
