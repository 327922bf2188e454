"""A run that goes takes offers of servers, and one that has ended takes none."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer


def test_an_offer_is_seen_until_it_is_withdrawn_and_only_its_owner_reads_the_token(tmp_path: Path) -> None:
    run, server = ServerFolder(tmp_path), ServerFolder(tmp_path)
    with pytest.raises(ValueError, match="no run goes in .* that takes servers"):
        server.read_settings()
    run.open({"hf_folder": "/models/tiny", "generate": {"max_num_seqs": 4}})
    assert server.read_settings()["generate"] == {"max_num_seqs": 4} and run.list_offers() == []
    offers = [ServerOffer("10.0.0.5", 8000, "a"), ServerOffer("fe80::1", 8001, "b")]
    paths = [server.offer(offer) for offer in offers]
    assert run.list_offers() == offers
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    # started again at the same address
    again = ServerOffer("10.0.0.5", 8000, "c")
    assert server.offer(again) == paths[0] and run.list_offers() == [again, offers[1]]
    paths[1].unlink()
    assert run.list_offers() == [again]
    run.close()
    assert not server.is_open
    run.open({})
    assert run.list_offers() == []  # offers to the run before
