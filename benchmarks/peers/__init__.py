"""batchserve beside other engines on this machine: OpenVINO GenAI, vLLM and llama.cpp."""
