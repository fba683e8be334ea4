"""Settings whose services meet nobody else's."""

from engine.settings.params import Params
from tests.helpers.live import free_port


def own_ports(**settings: object) -> Params:
    """Return settings whose services meet nobody else's."""
    names = ("engine", "trainer", "controller", "mlflow", "prefect")
    return Params.model_validate({name: {"port": free_port()} for name in names} | settings)
