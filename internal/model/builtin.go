package model

import _ "embed"

//go:embed tiny-q8_0.gguf
var builtin []byte

// Builtin is the built-in model, metronome-tiny in Q8_0, 3.1 MB: a Llama of
// 2.9 M parameters for demonstrations and tests. The bytes must not be changed.
func Builtin() []byte { return builtin }
