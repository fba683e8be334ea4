"""Ask a policy with OpenAI's client: by name, pinned to a revision, streamed; then rate an answer.

export OPENAI_BASE_URL=http://127.0.0.1:8460/v1 OPENAI_API_KEY=$(cat .graftwork/local.key)
python examples/openai_client.py
"""

from openai import OpenAI

client = OpenAI()
request = {
    "messages": [{"role": "user", "content": "What is 12 + 7?"}],
    "max_tokens": 8,
    "temperature": 0,
    "user": "ada",
}

# The policy's name follows its route; the answer's `model` is the revision that answered.
answer = client.chat.completions.create(model="adder", **request)
print(answer.model, answer.choices[0].message.content)

# That revision and no other, whatever is promoted later.
pinned = client.chat.completions.create(model=answer.model, **request)
print(pinned.model, pinned.choices[0].message.content)

stream = client.chat.completions.create(model="adder", stream=True, **request)
print("streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in stream))

# A reward from 0 to 1. Rewards of a canary's users decide whether it is promoted.
print(client.post("/feedback", body={"request_id": answer.id, "reward": 1.0}, cast_to=object))
