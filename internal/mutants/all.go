package mutants

// All are the mutants, by name.
var All = []Mutant{
	{
		Name: "fetch_on_loop",
		File: "internal/worker/decode.go",
		Why:  "the topology is fetched where it is needed: on the loop, with a timeout, as the original did",
		Edits: []Edit{{
			Old: "\td.peers.do(d.loop, *a)\n",
			New: "\tif a.Kind == sched.FetchInfo {\n" +
				"\t\tctx, cancel := context.WithTimeout(context.Background(), a.Timeout)\n" +
				"\t\td.peers.registry.FetchInfo(ctx, a.Addr)\n" +
				"\t\tcancel()\n" +
				"\t}\n" +
				"\td.peers.do(d.loop, *a)\n",
		}},
	},
}
