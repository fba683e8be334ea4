"""Malformed calls of the Tinker API: whatever is sent, the answer is not a 500."""

import random
from collections.abc import Iterator

import pytest

from engine.tinker import service as app
from tests.helpers.tinker_service import Served, tinker_served

# What a field may hold that it should not.
ODD = (
    None, True, -1, 0, 1 << 64, -(1 << 70), 1e308, "", "x" * 600, "\x00", "\u2028/..", "s1:train:0",
    "tinker://", "tinker://a/weights/b", "tinker://a/weights/b/c", [], [1, "a"], [[1]], {}, {"type": "image"},
    {"a": {"b": []}},
)  # fmt: skip
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"a"',
    b"\xff\xfe",
    b'{"a": NaN}',
    b"[" * 5000,
    b'{"session_id": "\\ud800"}',
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "POLL_S", 0.01)
        with tinker_served(tmp_path_factory.mktemp("fuzzed")) as found:
            yield found


def operations(served: Served) -> list[tuple[str, str, dict]]:
    schema = served.twice.app.openapi()
    return [
        (method.upper(), path.removeprefix("/api/v1"), _fields(schema, operation))
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if path.startswith("/api/v1/")
    ]


def _fields(schema: dict, operation: dict) -> dict:
    content = operation.get("requestBody", {}).get("content", {})
    name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    return schema["components"]["schemas"].get(name, {}).get("properties", {})


@pytest.mark.long
def test_no_call_of_the_schema_is_answered_500(served: Served) -> None:
    choose, wrong, asked = random.Random(25), [], 0
    session = served.ask("POST", "/create_session", json={}).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-dense"}
    served.ask("POST", "/create_model", json=made)
    known = {"session_id": session, "model_id": f"{session}:train:0", "base_model": "tiny-dense"}
    found = operations(served)
    assert len(found) >= 25
    for method, path, fields in found:
        bodies = [{name: choose.choice((*ODD, known.get(name))) for name in fields} for _ in range(12)]
        bodies += [{**{name: known[name] for name in fields if name in known}, "seq_id": n} for n in (1, 2)]
        for body in bodies if fields else [{}]:
            values = {part: choose.choice(["a", "%00", known["model_id"], "%F0%9F"]) for part in _parts(path)}
            asked += 1
            answer = served.ask(method, path.format(**values), json=body)
            if answer.status_code >= 500:
                wrong.append((method, path, body, answer.text[:200]))
        for raw in RAW if method == "POST" else ():
            for kind in ("application/json", "application/x-protobuf"):
                asked += 1
                headers = {"x-api-key": served.key, "content-type": kind}
                answer = served.raw(path.format(**dict.fromkeys(_parts(path), "a")), raw, headers)
                if answer.status_code >= 500:
                    wrong.append((method, path, raw[:20], answer.text[:200]))
    assert wrong == []
    assert asked > 400


def _parts(path: str) -> list[str]:
    return [piece[1:-1] for piece in path.split("/") if piece.startswith("{")]


def test_a_body_that_is_too_large_or_unpacks_to_too_much_is_refused(served: Served) -> None:
    import zstandard

    headers = {"x-api-key": served.key, "content-encoding": "zstd"}
    bomb = zstandard.compress(bytes(65 << 20))
    assert len(bomb) < 10_000
    assert "unpacks to over" in served.raw("/forward_backward", bomb, headers).text
    assert "not valid zstd" in served.raw("/forward_backward", b"plain", headers).text
    assert served.raw("/forward_backward", bytes(65 << 20), {"x-api-key": served.key}).status_code == 413
