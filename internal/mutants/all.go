package mutants

// All are the mutants, by name.
var All = []Mutant{}
