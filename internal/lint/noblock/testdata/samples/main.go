// Samples are loops that wait, each in another way. A comment "want:" on a line
// is a finding there: a regular expression that its text and chain match. A line
// without one has none.
package main

import "time"

func main() {
	interfaceLoop(dialer{})
	closureLoop(&hooks{})
	methodValueLoop()
	selectLoop(make(chan int), make(chan int))
	rangeLoop(make(chan int))
	fileLoop()
	dnsLoop()
	processLoop()
	logLoop()
	groupLoop()
	worldLoop()
	lockLoop(&table{})
	helperLockLoop(&ledger{})
	shortLockLoop(&counter{})
	passedLockLoop(&owner{})
	onceLoop()
	deferLoop()
	goLoop()
	formatLoop()
	sortLoop([]int{2, 1})
	allowLoop()
	sleeplessLoop(time.NewTimer(time.Hour), make(chan struct{}))
	sizes(nil)
}
