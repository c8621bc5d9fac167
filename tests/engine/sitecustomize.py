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

if os.environ.get("ENGINE_TEST_REPLICATED"):
    # As if vLLM said of the group what it says of latent attention, which its CPU platform does not have.
    import dataclasses

    from kvstrata.integrations.vllm import shapes

    _group = shapes._group

    def _replicated(*arguments):  # type: ignore[no-untyped-def]
        """The group, as one that is the same on all ranks."""
        return dataclasses.replace(_group(*arguments), replicated=True)

    shapes._group = _replicated
