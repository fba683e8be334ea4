"""An engine that logs for a collector: vLLM's lines and ours are objects, with the id of the request."""

import json

from tests.helpers.live import RunningEngine, eventually


def test_every_line_of_an_engine_is_an_object_with_its_request(crowded: RunningEngine) -> None:
    with crowded.client() as client:
        refused = client.get("/v1/models", headers={"authorization": "Bearer none"})
    assert refused.status_code == 401
    file = crowded.state / "params.log"

    def written() -> list[str]:
        # What has no end yet is still being written.
        return file.read_text().rpartition("\n")[0].splitlines()

    def lines() -> list[dict]:
        return [json.loads(line) for line in written() if line.startswith("{")]

    def said() -> list[str]:
        return [line["message"] for line in lines() if line.get("request") == id]

    id = refused.headers["x-request-id"]
    # Of its lines another one may come first.
    assert eventually(lambda: any("no valid key" in message for message in said()))
    assert {line["logger"].partition(".")[0] for line in lines()} >= {"vllm", "uvicorn"}
    # What is printed, such as a compiler's output, is not logged.
    others = [line for line in written() if not line.startswith("{")]
    assert len(others) < 0.2 * len(lines()), others
