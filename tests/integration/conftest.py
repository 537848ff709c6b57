"""Trains the rows that the selected tests name, and shows at the end what they gave."""

import pytest
from results import Results, Trained, summary

TRAINED = pytest.StashKey[Trained]()


@pytest.fixture(scope="session")
def results(request, tmp_path_factory) -> Results:
    params = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    names = {name for param in params if isinstance(name := param.get("row"), str)}
    trained = request.config.stash.setdefault(TRAINED, {})
    return Results(names, trained, tmp_path_factory.mktemp("trainings"))


def pytest_terminal_summary(terminalreporter, config):
    if trained := config.stash.get(TRAINED, {}):
        terminalreporter.write_line("\n" + summary(trained, terminalreporter.hasmarkup))
