"""The controller's page: what is served, what is being released, where to look further.

Plain HTML without outside resources; everything that comes from data is escaped.
"""

from collections.abc import Iterable
from html import escape
from time import localtime, strftime
from typing import TYPE_CHECKING

from engine.adapters.catalog import Release
from engine.config import DIGEST12

if TYPE_CHECKING:
    from engine.controller import Controller

RELEASES_SHOWN = 20
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 2rem }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #ddd; vertical-align: top }
th { font-weight: 600; color: #555 } code { font-size: .9em }
.alarm { background: #fde8e8; padding: .5rem .8rem } nav a { margin-right: 1.2rem }
"""


def render_page(controller: "Controller") -> str:
    """Return the page as HTML, as of now."""
    params, catalog = controller.params, controller.catalog
    routes = [
        (
            escape(route.policy),
            _digest(route.champion) or "base",
            _digest(route.canary) + (f" ({route.weight:.0%})" if route.canary else ""),
            _digest(route.previous),
        )
        for route in catalog.routes()
    ]
    releases = [_release_row(release) for release in catalog.releases()[:RELEASES_SHOWN]]
    buried = [
        (escape(stone.policy), _digest(stone.digest), escape(stone.by), escape(stone.reason), _when(stone.at))
        for stone in catalog.tombstones()
    ]
    return "".join(
        [
            "<!doctype html><html lang=en><meta charset=utf-8><title>Graftwork</title>",
            f"<meta http-equiv=refresh content=5><style>{STYLE}</style><h1>Graftwork</h1>",
            f'<nav><a href="{params.url("mlflow")}">MLflow</a><a href="{params.url("prefect")}">Prefect</a>',
            '<a href="/health">Health</a><a href="/metrics">Metrics</a><a href="/docs">Interface</a></nav>',
            *(f"<p class=alarm>{escape(f'{part}: {why}')}</p>" for part, why in controller.faults.items()),
            "<h2>Policies and routes</h2>",
            _table(("policy", "champion", "canary", "previous"), routes),
            "<h2>Releases</h2>",
            _table(("policy", "revision", "state", "reason", "updated"), releases),
            "<h2>Tombstones</h2>",
            _table(("policy", "revision", "by", "reason", "since"), buried),
            "</html>",
        ]
    )


def _release_row(release: Release) -> tuple[str, ...]:
    state = release.state if release.state != "running" else f"running: {release.step}"
    link = f'<a href="/releases/{escape(release.id)}">{_digest(release.revision)}</a>'
    return escape(release.policy), link, state, escape(release.reason), _when(release.updated_at)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{name}" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in rows)
    return f"<table><tr>{head}{body}</table>" if body else "<p>None.</p>"


def _digest(digest: str | None) -> str:
    return f"<code>{escape(digest[:DIGEST12])}</code>" if digest else ""


def _when(epoch_s: float) -> str:
    return strftime("%Y-%m-%d %H:%M:%S", localtime(epoch_s))
