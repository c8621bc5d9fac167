"""Read by every Python of an engine under test, its workers included: changes it as the environment says."""

import os

if os.environ.get("ENGINE_TEST_BAD_RANK"):
    from kvstrata.integrations.vllm import worker

    _real = worker.WorkerSide.start_loads

    def _start_loads(self, work):  # type: ignore[no-untyped-def]
        """Loads of the bad rank fail."""
        if str(self._rank) == os.environ["ENGINE_TEST_BAD_RANK"]:
            for job in work.loads:
                job.valid = False
        _real(self, work)

    worker.WorkerSide.start_loads = _start_loads

if os.environ.get("ENGINE_TEST_LOST_STORES"):
    # While this file exists, rank 1 stores nothing.
    from kvstrata.integrations.vllm.worker import WorkerSide

    _store = WorkerSide._store

    def _lossy_store(self, job):  # type: ignore[no-untyped-def]
        """A store that fails on rank 1."""
        if self._rank == 1 and os.path.exists(os.environ["ENGINE_TEST_LOST_STORES"]):
            job.groups[0].blocks[0] = 1 << 30
        _store(self, job)

    WorkerSide._store = _lossy_store

if os.environ.get("ENGINE_TEST_REPLICATED"):
    # As if vLLM said of the group what it says of latent attention, which its CPU platform does not have.
    import dataclasses

    from kvstrata.integrations.vllm import shapes

    _group = shapes._group

    def _replicated(*arguments):  # type: ignore[no-untyped-def]
        """The group, as one that is the same on all ranks."""
        return dataclasses.replace(_group(*arguments), replicated=True)

    shapes._group = _replicated
