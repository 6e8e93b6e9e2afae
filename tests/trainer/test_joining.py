"""How a process learns that it is one of several."""

import pytest

from jaxrl.trainer.processes import ProcessError, _given, _is_cluster

THREE = {"JAX_COORDINATOR_ADDRESS": "host0:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_the_environment_names_coordinator_number_and_process():
    assert _given({}) is None and not _is_cluster({})
    assert _given(THREE) == ("host0:1234", 4, 3)
    assert _given({"JAX_NUM_PROCESSES": "1"})[1] == 1


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is not set"),
        ({"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS is not set"),
        ({"JAX_COORDINATOR_ADDRESS": "host0"}, "it is host:port"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES is 'four'"),
        ({"JAX_PROCESS_ID": "4"}, "processes count from 0"),
    ],
)
def test_what_is_wrong_with_them_is_named(change, problem):
    with pytest.raises(ProcessError, match=problem):
        _given(THREE | change)


def test_a_pod_that_is_no_indexed_job_is_one_process():
    assert not _is_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
