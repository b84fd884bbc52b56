"""What mpirun and srun say to a rank, in torchrun's words.

The variables are those that Open MPI 4.1.4 and MPICH 4.0.2 were seen to set, and those of srun(1).
"""

import pytest

from firecaffe.cluster.launcher_variables import (
    check_rank_and_size,
    first_host,
    tasks_of_node,
    words_of,
)
from firecaffe.errors import LaunchError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "469827585",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
ALLOCATION = {"SLURM_JOB_ID": "200505", "SLURM_JOB_NODELIST": "gnode[10,20,25,37]"}
ALLOCATION |= {"SLURM_NTASKS": "8"}
ALLOCATION |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
"""Of a batch script, which is no rank of its job."""
SLURM = ALLOCATION | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[20,25,37]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
}
WHO = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
SECOND_OF_TWO = ("1", "2", "1", "2", "127.0.0.1")
LAST_OF_FIVE = ("4", "5", "0", "1", "gnode20")
KNOWN: list[tuple[dict[str, str], tuple[str, ...]]] = [
    (OPEN_MPI, SECOND_OF_TWO),
    (MPICH, SECOND_OF_TWO),
    (SLURM, LAST_OF_FIVE),
    (SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"}, LAST_OF_FIVE),
    (SLURM | OPEN_MPI, SECOND_OF_TWO),
    (SLURM | MPICH, SECOND_OF_TWO),
    (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "9", "MASTER_ADDR": "b"}, ("1", "9", "1", "2", "b")),
]


def test_a_rank_of_another_launcher() -> None:
    for environment, who in KNOWN:
        words = words_of(environment)
        assert tuple(words[name] for name in WHO) == who
        assert 1024 <= int(words["MASTER_PORT"]) < 32768  # below what Linux gives out by itself
        assert words_of(environment | {"MASTER_PORT": "7"})["MASTER_PORT"] == "7"


def test_jobs_have_ports_of_their_own() -> None:
    ports = {
        words_of(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})["MASTER_PORT"]
        for job in range(200500, 200510)
        for step in range(3)
    }
    assert len(ports) > 25


def test_who_is_no_rank_or_knows_it_already() -> None:
    for environment in (
        {},
        ALLOCATION,
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        SLURM | {"RANK": "3", "WORLD_SIZE": "4"},
    ):
        assert words_of(environment) == {}


def test_both_are_said_or_neither() -> None:
    for environment in ({}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "2"}):
        check_rank_and_size(environment)
    for environment, missing in (({"RANK": "0"}, "WORLD_SIZE"), ({"WORLD_SIZE": "2"}, "RANK")):
        with pytest.raises(LaunchError, match=f"{missing} is not set"):
            check_rank_and_size(environment)


def test_one_of_several_that_does_not_know_enough() -> None:
    for environment, named in (
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"),
        (MPICH | {"PMI_SIZE": "4"}, "MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "LOCAL_RANK"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "SLURM_STEP_NUM_TASKS"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "MASTER_ADDR"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK"),
    ):
        with pytest.raises(LaunchError, match=named):
            words_of(environment)


FIRST = {
    "node[01-03,07]": "node01",
    "node7": "node7",
    "login,node[1-2]": "login",
    "rack[1-2]-node[08-11],x": "rack1-node08",
    "gnode[10,20,25,37]": "gnode10",
    "a.example,b.example": "a.example",
}


def test_the_first_of_slurms_hosts_and_tasks_by_node() -> None:
    assert {hosts: first_host(hosts) for hosts in FIRST} == FIRST
    assert [tasks_of_node("5,4(x3)", node) for node in range(4)] == [5, 4, 4, 4]
    for tasks, node in (("5,4(x3)", 4), ("", 0), ("4(x", 0)):
        with pytest.raises(ValueError, match="no "):
            tasks_of_node(tasks, node)
