"""What a run needs of a site's machine: the site itself takes part in none that needs more than it has."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piebald.core.errors import SettingError
from piebald.federation.credentials.slots import slot_folder
from piebald.federation.link.wire_format import Needs
from piebald.federation.site.claims import Jobs, claim
from piebald.storage.lock import RunLock

from .conftest import Sites, carry_out, provisioned, settings

numbers = st.builds(Needs, gpus=st.integers(0, 5), gigabytes=st.integers(0, 50).map(float))


@given(numbers, st.lists(numbers, max_size=3), st.integers(0, 8), st.integers(0, 100))
def test_a_run_is_refused_where_the_sum_of_all_is_more_than_there_is(
    needs: Needs, beside: list[Needs], gpus: int, gigabytes: int
) -> None:
    reason = Jobs(gpus=gpus, gigabytes=gigabytes).reject_reason(needs, beside)
    too_many = needs.gpus > 0 and needs.gpus + sum(one.gpus for one in beside) > gpus
    too_much = needs.gigabytes > 0 and needs.gigabytes + sum(one.gigabytes for one in beside) > gigabytes
    assert (reason is not None) == (too_many or too_much)


def test_the_processes_of_a_site_share_what_it_has_and_give_it_back(tmp_path: Path) -> None:
    first = provisioned(tmp_path / "credentials") / "site-1"
    second, jobs = slot_folder(first, 1), Jobs(at_once=2, gpus=1, gigabytes=64.0)
    locks = [RunLock(first), RunLock(second)]  # both processes run
    assert claim(first, jobs, Needs(gpus=1, gigabytes=40.0)) is None
    assert claim(first, jobs, Needs(gpus=1, gigabytes=40.0)) is None  # the same slot does not add up with itself
    assert "of which its other runs have 1" in str(claim(second, jobs, Needs(gpus=1)))
    assert "gigabytes = 30" in str(claim(second, jobs, Needs(gigabytes=30.0)))
    assert claim(second, jobs, Needs(gigabytes=24.0)) is None
    assert claim(first, jobs, Needs()) is None  # its run is over
    assert claim(second, jobs, Needs(gpus=1, gigabytes=64.0)) is None
    locks[1].release()  # its process has ended, and holds nothing
    assert claim(first, jobs, Needs(gpus=1, gigabytes=64.0)) is None
    locks[0].release()


@pytest.mark.full
def test_a_site_refuses_by_itself_what_needs_more_than_it_states(sites: Sites, tmp_path: Path) -> None:
    """No queue has looked at it: this server asks whatever it likes."""
    made = settings({"name": "fedavg"}, rounds=1)
    credentials = str(sites.folder / "server")
    with pytest.raises(SettingError, match=r"site-\d: runtime.needs has gpus = 1, and this site states 0 graphics"):
        carry_out(made, tmp_path / "run", credentials=credentials, needs={"gpus": 1})
    carry_out(made, tmp_path / "run-2", credentials=credentials)
