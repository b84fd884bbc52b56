"""Starts N local ranks of a command by torch's elastic agent, as torchrun would."""

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from firecaffe.comm.world import LAUNCHED
from firecaffe.errors import LaunchError, PeerLostError

LOOPBACK = "127.0.0.1"


class RankFailedError(LaunchError):
    """A rank ended with an error of its own; the launcher ends with the same exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(
    arguments: list[str], nproc_per_node: int, master_port: int = 0, advice: str = ""
) -> None:
    """Runs `python -m firecaffe ARGUMENTS` as `nproc_per_node` ranks of one world.

    master_port: where the ranks meet on this host; 0 takes a free port. advice: for the user whose
    signal has ended them.

    Raises: LaunchError where the port is taken; RankFailedError for the rank that failed first.
    """
    check_port(master_port)
    # The agent reports in its own many-line form what we report in one line; its loggers set
    # levels of their own.
    logging.disable(logging.CRITICAL)
    os.environ[LAUNCHED] = "1"  # ranks leave the last word to this process
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the recipe sets the ranks' threads
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="firecaffe-ranks-") as log_folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc_per_node,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:{master_port}",
            local_addr=LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
        )
        try:
            elastic_launch(config, sys.executable)("-u", "-m", "firecaffe", *arguments)
        except ChildFailedError as error:
            raise _describe(error) from error
        except SignalException as error:
            name = error.sigval.name
            raise RankFailedError(
                f"ended by {name}{advice and '; '}{advice}",
                128 + error.sigval,
            ) from error
        except (DistError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise LaunchError(f"{nproc_per_node} ranks could not be started: {reason}") from error
        finally:
            logging.disable(logging.NOTSET)
            del os.environ[LAUNCHED]


def check_port(port: int) -> None:
    """Raises: LaunchError where somebody listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except (OSError, OverflowError) as error:
            raise LaunchError(
                f"--master-port {port} on {LOOPBACK} cannot be used ({error}); "
                "give another, or 0 for a free one"
            ) from error


def _describe(error: ChildFailedError) -> RankFailedError:
    """The failure that came first; a rank that only lost another is not the cause."""

    def when(rank: int) -> tuple[bool, bool, float]:
        failure = error.failures[rank]
        message = failure.error_file_data.get("message")  # a text where no report was left
        time_s = message["extraInfo"]["time_s"] if isinstance(message, dict) else failure.timestamp
        ended_by_agent = failure.exitcode == -signal.SIGTERM
        return ended_by_agent, failure.exitcode == PeerLostError.exit_code, time_s

    rank = min(error.failures, key=when)
    failure = error.failures[rank]
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankFailedError(f"rank {rank} was ended by {name}", 128 - failure.exitcode)
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        return RankFailedError(f"rank {rank}: {message['message']}", failure.exitcode)
    return RankFailedError(f"rank {rank} ended with code {failure.exitcode}", failure.exitcode)
