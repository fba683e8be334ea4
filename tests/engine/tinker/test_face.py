"""Every verb of the Tinker API with the real SDK, over a fake trainer; each POST comes twice."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import tinker

from engine.catalog.tinker_records import TinkerModel
from engine.errors import LimitReached, ServiceError
from engine.tinker import callers, models, sampling
from engine.tinker import service as app
from engine.tinker.models import state_name
from tests.helpers.tinker_service import Served, tinker_served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = {**app.CLIENT_CONFIG, "fwdbwd_max_chunk_len": 2, "proto_compress_fwdbwd": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "POLL_S", 0.2)
        patch.setattr(app, "CLIENT_CONFIG", config)
        patch.setenv("TINKER_TELEMETRY", "0")
        with tinker_served(tmp_path_factory.mktemp("tinker")) as found:
            yield found


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=served.url, api_key=served.key) as found:
        yield found


@pytest.fixture(autouse=True)
def fresh_calls(served: Served) -> None:
    served.backend.calls.clear()
    served.twice.seen.clear()


def datum(weight: float, targets: int = 3) -> tinker.Datum:
    inputs = {
        "target_tokens": tinker.TensorData(data=[1] * targets, dtype="int64", shape=[targets]),
        "weights": tinker.TensorData(data=[weight] * targets, dtype="float32", shape=[targets]),
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints([5] * targets), loss_fn_inputs=inputs)


def trained(client: tinker.ServiceClient, **given: Any) -> tinker.TrainingClient:
    return client.create_lora_training_client("tiny-dense", **{"rank": 8, **given}).result()


def test_calls_of_many_chunks_take_effect_once_and_in_order(
    served: Served, client: tinker.ServiceClient
) -> None:
    model = trained(client)
    gradients = [
        model.forward_backward([datum(float(n)) for n in range(1, 6)], "cross_entropy") for _ in "ab"
    ]
    step = model.optim_step(tinker.AdamParams(learning_rate=0.5))
    outputs = [one.result() for one in gradients]
    assert [len(one.loss_fn_outputs) for one in outputs] == [5, 5]
    assert [one.metrics["loss:sum"] for one in outputs] == [45.0, 45.0]
    assert step.result().metrics == {"weight": 45.0}
    # Chunks 2 and 3 come before chunk 1, and each comes twice.
    chunks = [body for path, _, body, *_ in served.twice.seen if path.endswith("forward_backward")]
    assert len(chunks) == 6
    assert [call for call in served.backend.calls if call[0] == "gradients"] == [
        ("gradients", seq, size) for seq, size in enumerate((2, 2, 1, 2, 2, 1), 1)
    ]
    assert served.backend.calls[-1] == ("step", f"{model.model_id}:7")
    assert sum(call[0] in ("create", "step") for call in served.backend.calls) == 2
    for path, headers, _, first, second in served.twice.seen:
        assert first == second, path
        if path.endswith("forward_backward"):
            assert headers[b"content-encoding"] == b"zstd"


def test_a_result_that_takes_long_is_polled_for(served: Served, client: tinker.ServiceClient) -> None:
    model = trained(client)
    served.backend.gate.clear()
    future = model.forward([datum(1.0)], "cross_entropy")
    time.sleep(1.0)
    served.backend.gate.set()
    assert future.result().metrics["loss:sum"] == 3.0
    assert served.backend.calls[-1] == ("forward", 1, 1)


def test_a_failed_operation_raises_its_sentence(served: Served, client: tinker.ServiceClient) -> None:
    model = trained(client)
    with pytest.raises(tinker.RequestFailedError, match="trainer"):
        model.forward_backward([datum(1.0)], "ppo").result()
    assert model.optim_step(tinker.AdamParams(learning_rate=0.0)).result().metrics == {"weight": 0.0}


def test_what_cannot_be_honoured_is_refused_by_name(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.BadRequestError, match="Rank 64"):
        trained(client, rank=64)
    with pytest.raises(tinker.BadRequestError, match="train_unembed alone"):
        trained(client, train_mlp=False, train_attn=False)
    with pytest.raises(tinker.BadRequestError, match="'gpt-9'"):
        client.create_lora_training_client("gpt-9").result()
    with pytest.raises(tinker.RequestFailedError, match="'stable_reinforce'"):
        trained(client).forward_backward([datum(1.0)], "stable_reinforce").result()


def test_the_calls_after_a_refused_one_go_on(served: Served, client: tinker.ServiceClient) -> None:
    model = trained(client)
    image = tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    seen = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={})
    refused = [
        model.forward_backward([datum(1.0)] * 5, "stable_reinforce"),
        model.forward_backward([seen], "cross_entropy"),
        model.optim_step(tinker.AdamParams(learning_rate=-1.0)),
        model.save_state("x", ttl_seconds=3),
        model.load_state(f"tinker://{model.model_id}/weights/absent"),
    ]
    last = model.optim_step(tinker.AdamParams(learning_rate=1.0))
    for future in refused:
        with pytest.raises((tinker.RequestFailedError, tinker.UnprocessableEntityError)):
            future.result()
    assert last.result().metrics == {"weight": 0.0}
    assert served.ask("GET", f"/training_runs/{model.model_id}").json()["corrupted"] is False


def test_a_state_is_loaded_by_the_call_after_its_save(client: tinker.ServiceClient) -> None:
    first, other = trained(client), trained(client)
    first.forward_backward([datum(1.0)], "cross_entropy")
    first.optim_step(tinker.AdamParams(learning_rate=1.0))
    path = f"tinker://{first.model_id}/weights/now"
    first.save_state("now")
    first.load_state(path).result()
    # Another model takes it too.
    other.load_state(path).result()
    assert other.forward([datum(0.0)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[0] == 3.0


def test_a_state_is_saved_loaded_listed_and_deleted(served: Served, client: tinker.ServiceClient) -> None:
    model = trained(client, user_metadata={"renderer_name": "plain"})
    model.forward_backward([datum(1.0)], "cross_entropy").result()
    model.optim_step(tinker.AdamParams(learning_rate=1.0)).result()
    path = model.save_state("a b", ttl_seconds=3600).result().path
    assert path == f"tinker://{model.model_id}/weights/a b"
    assert model.save_state("kept").result().path.endswith("/weights/kept")
    model.forward_backward([datum(1.0)], "cross_entropy").result()
    assert model.optim_step(tinker.AdamParams(learning_rate=1.0)).result().metrics == {"weight": 6.0}
    model.load_state(path).result()
    assert model.forward([datum(0.0)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[0] == 3.0

    again = client.create_training_client_from_state_with_optimizer(path)
    assert again.model_id != model.model_id
    assert again.forward([datum(0.0)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data[0] == 3.0

    rest = client.create_rest_client()
    rows = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [row.checkpoint_id for row in rows] == ["weights/a b", "weights/kept"]
    assert [row.expires_at is not None for row in rows] == [True, False]
    run = rest.get_training_run(model.model_id).result()
    assert run.user_metadata == {"renderer_name": "plain"}
    assert run.last_checkpoint.checkpoint_id == "weights/kept"
    rest.delete_checkpoint(model.model_id, "weights/kept").result()
    assert [row.checkpoint_id for row in rest.list_checkpoints(model.model_id).result().checkpoints] == [
        "weights/a b"
    ]
    assert [name for id, name in served.backend.states if id == model.model_id] == [state_name("a b")]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.lora_rank, info.train_unembed, info.train_mlp, info.train_attn) == (8, False, True, True)


def test_a_sampler_serves_a_snapshot_a_revision_and_the_base(
    served: Served, client: tinker.ServiceClient
) -> None:
    model = trained(client)
    model.forward_backward([datum(2.0)], "cross_entropy").result()
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    params = tinker.SamplingParams(max_tokens=4, stop=["x"])
    now = model.save_weights_and_get_sampling_client()
    answer = now.sample(prompt, 2, params).result()
    assert [list(one.tokens) for one in answer.sequences] == [[7, 8], [7, 8]]
    assert len({one.sequence_id for one in answer.sequences}) == 2
    path = model.save_weights_for_sampler("final").result().path
    assert path == f"tinker://{model.model_id}/sampler_weights/final"
    assert ("revision", [[5, 5, 5]]) in served.backend.calls
    final = client.create_sampling_client(model_path=path)
    assert list(final.compute_logprobs(prompt).result()) == [None, -1.0, -1.0]
    base = client.create_sampling_client(base_model="tiny-dense")
    base.sample(prompt, 1, params).result()
    policy = served.catalog.tinker.find(TinkerModel, "acme", model.model_id).policy
    assert policy.startswith("acme-")
    sampled = [call[1] for call in served.backend.calls if call[0] == "sample"]
    assert [name.partition("@")[0] for name in sampled] == [policy, policy, "tiny-dense"]


@pytest.mark.long
def test_samples_that_come_together_are_one_request(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine sends few within the usual hundredth of a second.
    monkeypatch.setattr(sampling, "TOGETHER_S", 0.2)
    base = client.create_sampling_client(base_model="tiny-dense")
    params = tinker.SamplingParams(max_tokens=4)
    prompts = [tinker.ModelInput.from_ints([1] * (n % 7 + 1)) for n in range(200)]
    asked = [base.sample(prompt, 1, params) for prompt in prompts]
    bad = base.sample(tinker.ModelInput.from_ints([999]), 1, params)
    assert all(list(one.result().sequences[0].tokens) == [7, 8] for one in asked)
    # One that the engine refuses fails alone.
    with pytest.raises(tinker.RequestFailedError, match="no token 999"):
        bad.result()
    sent = [call[2] for call in served.backend.calls if call[0] == "sample"]
    assert {seq for seqs in sent for seq in seqs} == set(range(201))
    assert max(map(len, sent)) > 4


def test_samples_that_fit_into_a_limit_alone_but_not_together_are_asked_for_alone(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience, alone = [], served.backend.sample

    def limited(served: str, plaintext: str, calls: Any, patience_s: float) -> list[bytes]:
        patience.append((len(calls), patience_s))
        if len(calls) > 2:
            raise LimitReached("60 tokens a minute", code="rate_limit_exceeded")
        return list(alone(served, plaintext, calls, patience_s))

    monkeypatch.setattr(served.backend, "sample", limited)
    # As above: of 40, a busy machine may send no five within the usual hundredth of a second.
    monkeypatch.setattr(sampling, "TOGETHER_S", 0.2)
    base = client.create_sampling_client(base_model="tiny-dense")
    params = tinker.SamplingParams(max_tokens=4)
    asked = [base.sample(tinker.ModelInput.from_ints([1]), 1, params) for _ in range(40)]
    assert all(list(one.result().sequences[0].tokens) == [7, 8] for one in asked)
    assert max(size for size, _ in patience) > 4
    assert {seconds for size, seconds in patience if size > 1} == {sampling.PATIENCE_TOGETHER_S}
    # Private: what is kept of a key that has no call waiting costs memory and shows nowhere.
    assert not served.models.sampling._queues


def test_samples_beyond_the_most_wait_for_the_client(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = client.create_sampling_client(base_model="tiny-dense")
    prompt, params = tinker.ModelInput.from_ints([1]), tinker.SamplingParams(max_tokens=4)
    base.sample(prompt, 1, params).result()
    monkeypatch.setattr(sampling, "MOST_SAMPLES", 0)
    sent = next(body for path, _, body, *_ in served.twice.seen if path.endswith("asample"))
    body = json.loads(sent) | {"seq_id": 77}
    answer = served.ask("POST", "/asample", json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    monkeypatch.undo()
    assert served.ask("POST", "/asample", json=body).status_code == 200


def test_a_silent_client_s_models_leave_the_trainer(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = served.ask("POST", "/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-dense", "lora_config": {"rank": 8}}
    made = served.ask("POST", "/create_model", json=body).json()["request_id"]
    model = served.result(made)["model_id"]

    def sweep() -> None:
        asyncio.run_coroutine_threadsafe(served.models.close_silent(), served.twice.loop).result(20)

    sweep()
    assert ("close", model) not in served.backend.calls
    monkeypatch.setattr(models, "SILENT_S", -1.0)
    sweep()
    assert ("close", model) in served.backend.calls
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    served.ask("POST", "/optim_step", json=step)
    # Its next call opens it again.
    assert "metrics" in served.result(f"{model}:1")
    assert ("reopen", model) in served.backend.calls


def test_an_unembedding_that_is_not_trained_is_told_by_a_header(served: Served) -> None:
    session = served.ask("POST", "/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-dense", "lora_config": {"rank": 8}}
    answer = served.ask("POST", "/create_model", json=body)
    assert "not trained" in answer.headers["x-deprecation-note"]
    body["lora_config"] = {"rank": 8, "train_unembed": False}
    body["model_seq_id"] = 1
    assert "x-deprecation-note" not in served.ask("POST", "/create_model", json=body).headers


def test_a_finished_session_takes_no_heartbeat_and_lets_its_models_go(served: Served) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=served.key) as own:
        model = trained(own)
    session = model.model_id.partition(":")[0]
    assert ("close", model.model_id) in served.backend.calls
    assert served.ask("POST", "/session_heartbeat", json={"session_id": session}).status_code == 410


def test_a_model_that_lost_gradients_in_a_restart_says_so(
    served: Served, client: tinker.ServiceClient
) -> None:
    model = trained(client)
    path = model.save_state("before").result().path
    model.forward_backward([datum(1.0)], "cross_entropy").result()
    # As after a restart: nothing of the model is in memory.
    assert served.models.lines.close("acme", model.model_id.partition(":")[0])
    with pytest.raises(tinker.RequestFailedError, match=r"Gradients.*restarted"):
        model.optim_step(tinker.AdamParams(learning_rate=1.0)).result()
    assert served.ask("GET", f"/training_runs/{model.model_id}").json()["corrupted"] is True
    assert client.create_training_client_from_state(path).model_id
    assert not any(call[0] == "step" for call in served.backend.calls)


def test_results_of_what_changed_something_outlive_the_process(
    served: Served, client: tinker.ServiceClient
) -> None:
    model = trained(client)
    model.optim_step(tinker.AdamParams(learning_rate=0.0)).result()
    promises, id = served.models.promises, f"{model.model_id}:1"
    answered = promises.find("acme", id)
    assert answered is not None
    promises.drop(answered)
    told = served.ask("POST", "/retrieve_future", json={"request_id": f"{model.model_id}:1"})
    assert told.json()["metrics"] == {"weight": 0.0}
    gone = served.ask("POST", "/retrieve_future", json={"request_id": f"{model.model_id}:77"})
    assert gone.status_code == 410


def test_telemetry_is_accepted_and_stored_nowhere(served: Served) -> None:
    said = {"events": [{"headers": {"x-api-key": "tml-secret"}}], "platform": "", "session_id": "s"}
    assert served.ask("POST", "/telemetry", json=said).json() == {"status": "accepted"}
    dump = json.dumps([served.catalog.tinker.page(TinkerModel, "acme", 1000, 0)], default=str)
    assert "tml-secret" not in dump


def test_a_wrong_key_is_401_and_a_key_without_the_role_too(served: Served) -> None:
    for key in ("tml-wrong", "gw-wrong", "tml-" + "0" * 40):
        assert served.ask("GET", "/training_runs", key=key).status_code == 401
    user = served.catalog.keys.create("third", "user", ["third-*"])
    assert served.ask("GET", "/training_runs", key=user).status_code == 401
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=served.url, api_key="tml-wrong").get_server_capabilities()


def test_a_suspended_tenant_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "KNOWN_S", 0.0)
    key = served.catalog.keys.create("fourth", "tinker", ["fourth-*"])
    assert served.ask("GET", "/training_runs", key=key).status_code == 200
    served.catalog.keys.suspend("fourth", "It never sleeps")
    refused = served.ask("GET", "/training_runs", key=key)
    assert refused.status_code == 403
    assert "It never sleeps." in refused.json()["detail"]
    served.catalog.keys.resume("fourth")
    assert served.ask("GET", "/training_runs", key=key).status_code == 200


def test_without_a_key_no_body_is_read(served: Served) -> None:
    for path in ("/asample", "/forward_backward", "/nowhere"):
        assert served.raw(path, b"{" * 100, {"x-api-key": "tml-wrong"}).status_code == 401
    large = b" " * (9 << 20)
    assert served.raw("/asample", large, {"x-api-key": "tml-wrong"}).status_code == 401
    answer = served.raw("/asample", large, {"x-api-key": served.key})
    assert (answer.status_code, "over 8 MiB" in answer.json()["detail"]) == (413, True)


def test_a_key_of_other_policies_finds_neither_model_nor_checkpoint(
    served: Served, client: tinker.ServiceClient
) -> None:
    model = trained(client)
    path = model.save_state("kept").result().path
    limited = served.catalog.keys.create("acme", "tinker", ["acme-b-*"])
    step = {"model_id": model.model_id, "seq_id": 2, "adam_params": {}}
    run = f"/training_runs/{model.model_id}"
    for key, status in ((limited, 404), (served.key, 200)):
        assert served.ask("POST", "/get_info", key, json={"model_id": model.model_id}).status_code == status
        assert served.ask("POST", "/weights_info", key, json={"tinker_path": path}).status_code == status
        assert served.ask("GET", f"{run}/checkpoints", key).status_code == status
    assert served.ask("POST", "/optim_step", limited, json=step).status_code == 404
    assert served.ask("DELETE", f"{run}/checkpoints/weights/kept", limited).status_code == 404
    assert served.ask("GET", "/training_runs", limited).json()["training_runs"] == []
    assert served.ask("GET", "/checkpoints", limited).json()["checkpoints"] == []


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"', f'"{"x" * (65 << 10)}"'])
def test_metadata_that_json_cannot_carry_are_refused(served: Served, value: str) -> None:
    body = f'{{"user_metadata": {{"a": {value}}}}}'.encode()
    headers = {"x-api-key": served.key, "content-type": "application/json"}
    assert served.raw("/create_session", body, headers).status_code == 422
    assert served.ask("GET", "/training_runs").status_code == 200


def test_a_checkpoint_that_was_saved_again_is_not_deleted(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(client)
    model.save_state("again").result()
    key = served.catalog.keys.find(served.key)
    assert key is not None
    old = served.models.checkpoint(key, model.model_id, "weights", "again")
    model.save_state("again", overwrite=True).result()
    served.models.delete(*old)
    new, _ = served.models.checkpoint(key, model.model_id, "weights", "again")
    assert new.created_at > old[0].created_at
    # The trainer is away: the row stays, so that a later round deletes both.
    monkeypatch.setattr(served.backend, "delete_state", Mock(side_effect=ServiceError("away")))
    with pytest.raises(ServiceError):
        served.models.delete(new, old[1])
    assert served.models.checkpoint(key, model.model_id, "weights", "again")[0] == new


def test_a_call_that_cannot_be_stored_fails_and_the_next_goes_on(
    served: Served, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stored = trained(client), served.catalog.tinker.advance
    broken = Mock(side_effect=[TimeoutError("no connection"), stored])
    monkeypatch.setattr(served.catalog.tinker, "advance", lambda *given: broken(*given) and stored(*given))
    with pytest.raises(tinker.RequestFailedError, match="The server failed"):
        model.optim_step(tinker.AdamParams(learning_rate=0.5)).result()
    assert model.optim_step(tinker.AdamParams(learning_rate=0.5)).result()


def test_another_tenants_model_is_as_absent(served: Served, client: tinker.ServiceClient) -> None:
    model = trained(client)
    theirs = model.model_id
    path = model.save_state("mine").result().path
    final = model.save_weights_for_sampler("final").result().path
    sampler = model.save_weights_and_get_sampling_client()
    session = theirs.partition(":")[0]
    own = served.ask("POST", "/create_session", key=served.other, json={}).json()["session_id"]
    absent = theirs.translate(str.maketrans("0123456789", "1234567890"))

    def asked(id: str, path: str, final: str, sampler: str) -> list[tuple[int, bytes]]:
        step = {"model_id": id, "seq_id": 9, "adam_params": {}}
        sample = {"sampling_session_id": sampler, "seq_id": 5, "prompt": {"chunks": []}}
        load = {"session_id": own, "model_seq_id": 0, "path": path}
        run = f"/training_runs/{id}"
        answers = [
            served.ask("POST", "/get_info", served.other, json={"model_id": id}),
            served.ask("POST", "/optim_step", served.other, json=step),
            served.ask("POST", "/save_weights", served.other, json={**step, "path": "x"}),
            served.ask("POST", "/save_weights_for_sampler", served.other, json={**step, "path": "x"}),
            served.ask("POST", "/load_weights", served.other, json=load),
            served.ask("POST", "/weights_info", served.other, json={"tinker_path": path}),
            served.ask(
                "POST",
                "/create_sampling_session",
                served.other,
                json={"session_id": own, "sampling_session_seq_id": 0, "model_path": final},
            ),
            served.ask("POST", "/asample", served.other, json=sample),
            served.ask("GET", f"/samplers/{sampler}", served.other),
            served.ask("GET", run, served.other),
            served.ask("GET", f"{run}/checkpoints", served.other),
            served.ask("DELETE", f"{run}/checkpoints/weights/mine", served.other),
            served.ask(
                "PUT", f"{run}/checkpoints/weights/mine/ttl", served.other, json={"ttl_seconds": 3600}
            ),
            served.ask("POST", f"{run}/checkpoints/sampler_weights/final/publish", served.other),
            served.ask("GET", f"/sessions/{id.partition(':')[0]}", served.other),
            served.ask("POST", "/retrieve_future", served.other, json={"request_id": f"{id}:1"}),
            served.ask("POST", "/session_heartbeat", served.other, json={"session_id": id.partition(":")[0]}),
        ]
        return [(one.status_code, one.content) for one in answers]

    found = asked(theirs, path, final, f"{session}:sample:0")
    assert found == asked(absent, path.replace(theirs, absent), final.replace(theirs, absent), "s0:sample:0")
    assert {status for status, _ in found} == {404, 410}
    assert served.ask("GET", "/checkpoints", served.other).json()["checkpoints"] == []
    assert sampler is not None
    assert served.ask("GET", f"/training_runs/{theirs}/checkpoints").json()["checkpoints"] != []
