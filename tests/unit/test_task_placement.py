"""Slurm's, Open MPI's and MPICH's environments as they are, and as they should not be."""

import doctest
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.launch import task_placement
from paceline.launch.task_placement import TaskPlacement, check_world, detect, first_host

# srun -N 3 -n 5, third task; the job's node list and step agree.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}
# mpirun -n 4 of Open MPI 5
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-node1-1234@1",
}
# mpiexec -n 2 of MPICH 4 (hydra)
MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "node1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}


def test_slurm():
    assert detect(SLURM) == TaskPlacement(
        source="slurm",
        task_number=3,
        task_count=5,
        local_task_number=1,
        local_task_count=2,
        first_host="gpu07",
        job_name="slurm-4711.0",
    )
    last = {**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert detect(last).local_task_count == 1


def test_a_step_smaller_than_its_job_counts_by_itself():
    step = {**SLURM, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "5"}
    assert detect(step).task_count == 5
    old = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert detect(old).task_count == 5


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291"])
def test_a_batch_script_and_an_interactive_shell_start_ranks_by_themselves(step):
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    del environ["SLURM_STEP_ID"]
    assert detect({**environ, **({"SLURM_STEP_ID": step} if step else {})}) is None


def test_a_shell_at_a_terminal_in_a_step_starts_ranks_by_itself():
    """The other tasks of `srun -n 2 --pty bash` have ended: to wait for them is in vain."""
    pid, terminal = pty.fork()
    if pid == 0:  # a session of its own, as the shell's; this process leads it
        codes = []
        for is_command in (False, True):
            child = os.fork()
            if child == 0:
                if is_command:  # a shell with job control gives each one a process group
                    os.setpgid(0, 0)
                os._exit(0 if (detect(SLURM) is None) is is_command else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(any(codes))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


def test_openmpi():
    assert detect(OPENMPI) == TaskPlacement(
        source="openmpi",
        task_number=2,
        task_count=4,
        local_task_number=0,
        local_task_count=2,
        job_name="prterun-node1-1234@1",
    )


def test_mpich():
    assert detect(MPICH) == TaskPlacement(
        source="mpich", task_number=1, task_count=2, local_task_number=1, local_task_count=2
    )


@pytest.mark.parametrize("inner", [OPENMPI, MPICH])
def test_mpirun_within_a_slurm_step_counts_the_ranks(inner):
    """mpirun starts its daemons with srun, so ranks see the daemons' step too."""
    daemons = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert detect({**daemons, **inner}) == detect(inner)


@pytest.mark.parametrize("environ", [{}, {"PMI_RANK": "0"}, {"SLURM_PROCID": "0"}, {"PATH": "/"}])
def test_no_launcher(environ):
    assert detect(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        {**SLURM, "SLURM_PROCID": "x"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "3"},  # rank 3 of 3
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": ""},
        {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "2"},  # local rank 2 of 2
        {**MPICH, "PMI_RANK": "-1"},
        {**MPICH, "PMI_SIZE": "0"},
        {key: value for key, value in MPICH.items() if key != "PMI_SIZE"},
        {key: value for key, value in SLURM.items() if key != "SLURM_LOCALID"},
    ],
)
def test_what_makes_no_sense_is_refused(environ):
    with pytest.raises(UsageError, match="variables of Slurm or mpirun"):
        detect(environ)


@given(
    st.sampled_from([SLURM, OPENMPI, MPICH]).flatmap(
        lambda base: st.fixed_dictionaries({key: st.text(max_size=4) for key in base})
    )
)
def test_garbage_is_refused_or_makes_sense(environ):
    try:
        found = detect(environ)
    except UsageError:
        return
    if found is not None:
        assert 0 <= found.task_number < found.task_count
        assert 0 <= found.local_task_number < found.local_task_count


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[3-5]", "node3"),
        ("node[003,7-9],login", "node003"),
        ("a,b[1-2]", "a"),
        ("r1-n[01-02]", "r1-n01"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_the_examples_in_the_module_run():
    result = doctest.testmod(task_placement)
    assert result.attempted
    assert not result.failed


def test_another_number_of_ranks_than_of_tasks_is_refused():
    check_world(detect(SLURM), None)
    check_world(detect(SLURM), 5)
    with pytest.raises(UsageError, match=r"3 ranks were asked for.*slurm step has 5") as caught:
        check_world(detect(SLURM), 3)
    assert "srun -n 3" in caught.value.fix
    with pytest.raises(UsageError) as caught:
        check_world(detect(MPICH), 3)
    assert "mpirun -n 3" in caught.value.fix
