"""What a test's handler of an HTTP server needs to speak JSON."""

import json
from typing import Any


class JsonAnswers:
    """Beside `BaseHTTPRequestHandler`: reads and answers JSON, and logs nothing."""

    def body(self) -> Any:
        """Return the request's body."""
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def reply(self, value: Any, status: int = 200) -> None:
        """Answer with a value."""
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass
