package model

// maxVocab bounds the number of tokens that a file may define.
const maxVocab = 1 << 20
