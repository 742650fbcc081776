package transfer

// fetch begins to bring n bytes into the cache, and claim likewise for writing;
// neither waits for them. Any address will do.
//
//go:noescape
func fetch(p *byte, n int)

//go:noescape
func claim(p *byte, n int)
