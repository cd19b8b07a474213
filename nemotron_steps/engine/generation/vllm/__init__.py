"""The generator on vLLM's asynchronous engine; weights come by its weight-transfer API."""
