"""The report that several files read."""

import pytest

from raysim.analysis.report import compose


@pytest.fixture(scope="session")
def page(report_runs):
    """Return a report of the trained runs on three networks."""
    return compose(report_runs, ("100mbps", "10mbps", "free"))
