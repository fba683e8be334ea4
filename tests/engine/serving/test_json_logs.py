"""An engine that logs for a collector: vLLM's lines and ours are objects, with the id of the request."""

import json

from tests.helpers.live import RunningEngine, eventually


def test_every_line_of_an_engine_is_an_object_with_its_request(crowded: RunningEngine) -> None:
    with crowded.client() as client:
        refused = client.get("/v1/models", headers={"authorization": "Bearer none"})
    assert refused.status_code == 401
    file = crowded.state / "params.log"

    def lines() -> list[dict]:
        return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]

    id = refused.headers["x-request-id"]
    assert eventually(lambda: any(line.get("request") == id for line in lines()))
    assert any("no valid key" in line["message"] for line in lines() if line.get("request") == id)
    assert {line["logger"].partition(".")[0] for line in lines()} >= {"vllm", "uvicorn"}
    # What is printed, such as a compiler's output, is not logged.
    others = [line for line in file.read_text().splitlines() if not line.startswith("{")]
    assert len(others) < 0.2 * len(lines()), others
