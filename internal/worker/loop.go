package worker

type loop struct{}
