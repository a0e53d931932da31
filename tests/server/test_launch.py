"""What a start finds out before it serves."""

import pytest

from neaptide.launch.serve import LaunchError, listen


def test_of_two_starts_on_one_port_the_later_one_is_told() -> None:
    host = "127.0.0.1"
    with listen(host, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(LaunchError) as refused:
            listen(host, port)
    assert str(refused.value) == f"cannot listen on {host}:{port}: Address already in use"
