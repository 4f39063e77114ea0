"""SmolLM2 for specdec: a dense Llama target read from a GGUF file, drafted for by prompt lookup. Importing this loads nothing."""
