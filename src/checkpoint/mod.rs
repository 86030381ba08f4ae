//! A Hugging Face folder: configuration, tensors, tokenizer.
