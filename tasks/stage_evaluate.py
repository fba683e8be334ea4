"""The stage `evaluate` of `dvc repro`: scores a revision and its base on an engine of its own.

Only what this module imports can change the numbers: dvc.yaml lists it, and a test derives the list.
"""

import shutil

from engine.errors import EffectError
from engine.settings.params import Params
from tasks.evaluation import write_evaluation
from tasks.stage_files import Report, files_of, opened_suite, own_services
from tasks.verify import verify


def evaluate(params: Params, report: Report) -> None:
    """Score the revision and the base on an engine of its own, and write metrics and items.

    Items are sent in their frozen order, `evaluate.batch` at a time. Raises `EffectError` when the engine
    does not reproduce the revision's effect probe, since it would score another model.
    """
    from engine.adapters.revision import read_revision
    from engine.publishing.importing import import_revision
    from tasks.score import score

    files = files_of(params)
    _, manifest = read_revision(files.revision)
    suite = opened_suite(files)
    engine = params.engine.model_copy(update={"max_num_seqs": params.evaluate.batch})
    params = params.model_copy(update={"engine": engine})
    shutil.rmtree(files.services / "evaluate", ignore_errors=True)
    with own_services(
        params, "evaluate", ("engine",), report, lambda stage: import_revision(stage, files.revision)
    ) as (stage, key):
        if (stage.paths.revision(manifest.policy, manifest.digest)).is_dir():
            probe = verify(stage, manifest.policy, manifest.digest, key)
            # A revision that equals the base is scored; one that the engine does not reproduce is not.
            if max(probe["error"], probe["base_error"]) > probe["tolerance"]:
                raise EffectError(f"{probe['reason']} It is not scored.")
        stage = stage.model_copy(update={"suites_dir": files.suite})
        scores = [
            score(stage, manifest.policy, digest, suite.name, key, reuse=False)
            for digest in (None, manifest.digest)
        ]
    write_evaluation(files.root, suite, *scores)
