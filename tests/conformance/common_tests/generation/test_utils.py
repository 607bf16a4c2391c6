"""Not in the source distribution: tests of `generate()`. The family's own are in `tests/modeling`."""


class GenerationTesterMixin:
    pass
