"""Not in the source distribution: tests of ONNX and ExecuTorch export."""


class ExportTesterMixin:
    pass
