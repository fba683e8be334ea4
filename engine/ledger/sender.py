"""Sends the spool's files to a controller on another machine, which acknowledges what is on its disk.

The spool stays the buffer: a file is removed once it is acknowledged. A file that is sent twice, because a
process died in between, has the same events with the same ids, and the ledger takes each once.
"""

import logging
import time
from pathlib import Path

from engine.clients.controller import ControllerClient
from engine.errors import GraftworkError
from engine.file_lock import alone_in
from engine.ledger.spool import REJECTED, Spool, read_lines, ready_files
from engine.security.credentials import known_credential
from engine.settings.params import Params

# The longest pause after a failure.
MOST_PAUSE_S = 5.0
# What the controller takes in one call: a file of the spool and its last event.
MOST_BYTES = 2 << 20
# Files in a controller's spool that came from another machine.
SENT = "sent-"
log = logging.getLogger("graftwork.events")


def open_spool(params: Params, writer: str) -> Spool:
    """Open a writer's spool, whose files are sent if the controller is elsewhere (`controller.at`)."""
    if params.controller.at is None:
        return Spool(params.paths.spool, writer)
    # Installations of before have the controller's own, which reads, too.
    key = known_credential(params.paths, "events") or known_credential(params.paths, "controller")
    client = ControllerClient(params.controller.at, key, patience_s=0)
    return Spool(params.paths.spool, writer, EventSender(params.paths.spool, client).send)


class EventSender:
    """Sends a spool's files, of all its writers; one of several processes at a time."""

    def __init__(self, root: Path, client: ControllerClient):
        self._root, self._client = root, client
        self._pause_s, self._not_before, self._said = 0.0, 0.0, ""

    def send(self) -> int:
        """Send every ready file and return how many were acknowledged.

        What stays is sent later, with growing pauses; each new fault is logged once. A file that the
        controller would never take is set aside, so that it keeps nothing else back.
        """
        if time.monotonic() < self._not_before:
            return 0
        sent = 0
        try:
            with alone_in(self._root / "sending.lock") as is_ours:
                for path in ready_files(self._root) if is_ours else ():
                    sent += self._send(path)
            self._pause_s, self._said = 0.0, ""
        except (GraftworkError, OSError) as error:
            self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s or 0.25)
            self._not_before = time.monotonic() + self._pause_s
            if str(error) != self._said:
                log.warning("Events wait in %s: %s", self._root, error)
            self._said = str(error)
        return sent

    def _send(self, path: Path) -> bool:
        # A controller of this machine, with the same settings, keeps here what others sent.
        if path.name.startswith(SENT):
            return False
        try:
            lines = b"".join(read_lines(path))
        except FileNotFoundError:
            return False
        parts = parts_of(lines)
        if any(len(part) > MOST_BYTES for part in parts):
            aside = self._root / REJECTED
            aside.mkdir(mode=0o700, exist_ok=True)
            path.rename(aside / path.name)
            log.error(
                "%s is set aside in %s: an event in it has over %d bytes.", path.name, aside, MOST_BYTES
            )
            return False
        for number, part in enumerate(parts):
            # The first part has the file's own name, as every file of a usual size.
            self._client.deliver(f"{path.stem}-{number}" if number else path.stem, part)
        path.unlink(missing_ok=True)
        return True


def parts_of(lines: bytes, most: int = MOST_BYTES) -> list[bytes]:
    """Return lines in parts of at most `most` bytes; a longer line is a part of its own."""
    parts: list[bytes] = []
    for line in lines.splitlines(keepends=True):
        if parts and len(parts[-1]) + len(line) <= most:
            parts[-1] += line
        else:
            parts.append(line)
    return parts
