"""An ``--out`` that cannot hold a cache is refused before the target is loaded."""

from pathlib import Path

import pytest

from dspark.capture.prepare import check_out
from dspark.schemas.errors import InputError


@pytest.mark.parametrize("inside", ["", "cache"])
def test_a_link_that_leads_nowhere(inside: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"--out .*link.* is a link that leads nowhere"):
        check_out(link / inside)
    (tmp_path / "nowhere").mkdir()
    check_out(link / inside)
