"""Starts the cells of one node: `python -m dflash_core.training.one_node --nproc-per-node=N [torchrun's options] PROGRAM`.

This is `torchrun --standalone` but for where it listens. PyTorch's stores bind all interfaces whatever host they are given, have
no password, and torchrun unpickles what they hold. So here the store gets a socket that is bound to loopback, and gloo and
NCCL are told to stay on the loopback interface, unless the environment says which one to take.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Sequence

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run as torchrun
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

HOST, BACKEND, INTERFACE = "127.0.0.1", "loopback", "lo"


class LoopbackRendezvous(RendezvousHandler):
    """The only node there is meets itself; its cells share one store, which this process serves on loopback."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = socket.create_server((HOST, 0))
        self._port = int(listener.getsockname()[1])
        # The store takes the descriptor over and closes it.
        self._store = TCPStore(HOST, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def get_backend(self) -> str:
        """As torchrun's option names it."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The cells join this store and serve none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The same store for each attempt; cells keep attempts apart (`distributed.CellGroup`)."""
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(HOST, self._port))

    def is_closed(self) -> bool:
        """Never: nobody else can close it."""
        return False

    def set_closed(self) -> None:
        """Nobody else has to know."""

    def num_nodes_waiting(self) -> int:
        """No other node can come."""
        return 0

    def get_run_id(self) -> str:
        """Drawn for each start."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with the process."""
        return True


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def main(arguments: Sequence[str]) -> None:
    """Start the cells and wait for them, with torchrun's options but for those of the rendezvous; exits as torchrun does."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, INTERFACE)
    rendezvous_handler_registry.register(BACKEND, _handler)
    meet = [f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={HOST}:0", f"--rdzv-id={uuid.uuid4()}"]
    torchrun.main(["--nnodes=1", *meet, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
