"""How services log: lines for people, or JSON for a collector, each with the id of its request."""

import json
import logging
import logging.config
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.files import write_whole

# The id of the request that this work is for.
REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
# Our loggers have levels of their own: a library in the engine sets the root's to ERROR.
OURS = ("graftwork", "engine")
LINES = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """A line of JSON a record: `at` (UTC), `level`, `logger`, `message`, and `request`, `error` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := REQUEST.get()) is not None:
            line["request"] = request
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configuration(level: int = logging.INFO) -> dict[str, Any]:
    """Return the configuration of JSON lines on stderr for `logging.config`, and for vLLM and uvicorn."""
    name = logging.getLevelName(level)
    # vLLM's and uvicorn's own handlers would say each line again.
    theirs = ("vllm", "uvicorn", "uvicorn.error", "uvicorn.access")
    passed_on = {"level": name, "handlers": [], "propagate": True}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"class": f"{__name__}.{JsonLines.__name__}"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
        "root": {"level": name, "handlers": ["stderr"]},
        "loggers": {key: {"level": name} for key in OURS} | dict.fromkeys(theirs, passed_on),
    }


def set_up(form: str, level: int = logging.INFO) -> None:
    """Configure this process's logging: `text` or `json`. Give uvicorn no `log_config` of its own then."""
    if form == "json":
        logging.config.dictConfig(configuration(level))
    else:
        logging.basicConfig(level=level, format=LINES, force=True)
        for name in OURS:
            logging.getLogger(name).setLevel(level)


def write_configuration(path: Path) -> None:
    """Write the configuration of JSON lines, for processes that read it from a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(configuration()))
