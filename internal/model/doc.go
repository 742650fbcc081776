// Package model reads a model file: the GGUF container, the hyper parameters
// and tensors in it, its tokenizer and its chat template. It computes nothing
// with weights; that is the engine's work.
//
// A file is outside input. Open maps it read-only and checks every count, size
// and offset against the bytes that are there before it believes them; what is
// truncated, contradictory, unknown or too new is refused in one line that
// names the key, tensor or offset. The same holds for the tokenizer and the
// chat template: what this package does not know, it refuses when the model is
// loaded, never while a request runs, and it never guesses.
//
// Use:
//
//	f, err := model.Open(path)                 // or OpenBytes("tiny", model.Builtin())
//	h, err := f.Hyper()                        // sizes; also proves that all tensors are there, in the right shapes
//	t, ok := f.Tensor("token_embd.weight")     // a view into the mapping
//	tok, err := model.NewTokenizer(f)
//	tpl, err := model.NewTemplate(f, tok)
//	ids, err := tpl.Tokens(messages, true)
//
// Tensor data are views: they live until Close. Tokenizer and Template copy
// what they need, are immutable, and may be used from many goroutines at once.
package model
