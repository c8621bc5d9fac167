"""kvstrata in vLLM: a KV connector, and a secondary tier for vLLM's own tiering. All that touches vLLM is in here."""
