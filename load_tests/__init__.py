"""Load against a real server over gRPC: `make load`, or `python -m load_tests.run --smoke`."""
