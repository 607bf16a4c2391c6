"""What pytest needs to know before it collects the common tests of transformers."""

collect_ignore = ["common_tests"]  # the suite itself is a library here

SUITE_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_fsdp_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "torch_compile_test",
)


def pytest_configure(config):
    for marker in SUITE_MARKERS:
        config.addinivalue_line("markers", f"{marker}: used by the common tests of transformers")
