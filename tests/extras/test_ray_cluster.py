"""The cluster that the tests of `ramify.ray` run on is a real one: processes of its own, which find this package."""

from __future__ import annotations

import os

import pytest

from tests.extras.conftest import within

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-extras")


def test_tasks_run_in_other_processes_and_find_the_package(driver: str) -> None:
    def task() -> tuple[int, str]:
        import ramify

        return os.getpid(), ramify.__version__

    process, version = within(60, lambda: ray.get(ray.remote(task).remote(), timeout=60))
    assert process != os.getpid()
    assert version
    assert ray.cluster_resources()["CPU"] == 2
    assert driver
