package lint

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
)

// TestProofResults: what scripts/prove.sh has found shows what docs/proof.md
// says: enough seeds of the simulator, enough random breakages of the cores,
// and a loop that waits beside ours. A run that failed stays in the file, with
// what became of it.
func TestProofResults(t *testing.T) {
	text, err := os.ReadFile(root + "/testdata/proof-results.txt")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`^\d{4}-\d\d-\d\d \S+ (\w+): (ok|FAILED \(.+, fixed since\)), (.+)$`)
	said := map[string][]string{}
	for _, l := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		m := line.FindStringSubmatch(l)
		if m == nil {
			t.Errorf("not a result: %s", l)
		} else if m[2] == "ok" {
			said[m[1]] = append(said[m[1]], m[3])
		}
	}
	for what, judge := range map[string]func([]string) error{"simulator": seeds, "mutations": mutations, "baseline": baseline, "compare": compared} {
		if err := judge(said[what]); err != nil {
			t.Errorf("%s: %v; scripts/prove.sh %s", what, err, what)
		}
	}
}

// numbers are the groups of the pattern's first match, none if there is none.
func numbers(text, pattern string) (n []float64) {
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	for i := 1; i < len(m); i++ {
		var x float64
		fmt.Sscan(m[i], &x)
		n = append(n, x)
	}
	return n
}

// leastSeeds must have run on the code as it is, or nearly.
const leastSeeds = 20000

func seeds(runs []string) error {
	sum, ran := 0.0, map[float64]bool{}
	for _, r := range runs {
		n := numbers(r, `from seed (\d+) on: (\d+) seeds in`)
		if len(n) == 0 {
			return fmt.Errorf("%q tells no seeds", r)
		}
		if ran[n[0]] {
			return fmt.Errorf("the seeds from %v on ran twice", n[0])
		}
		ran[n[0]] = true
		sum += n[1]
	}
	if sum < leastSeeds {
		return fmt.Errorf("%v seeds ran, want %d", sum, leastSeeds)
	}
	return nil
}

func mutations(runs []string) error {
	for _, r := range runs {
		n := numbers(r, `(\d+) mutations, (\d+) killed, (\d+) explained`)
		if len(n) == 3 && n[0] >= 200 && n[0] == n[1]+n[2] {
			return nil
		}
	}
	return fmt.Errorf("no run of 200 or more, all killed or explained, in %q", runs)
}

// The cycles of a loop that waits 5 s for each answer, in seconds.
var cycles = []struct {
	scene, hung string // as the process test and the simulator call them
	cycle       float64
}{
	{"1 hung registry", "1", 5}, {"2 hung registries", "2", 10}, {"4 hung registries", "4", 20}, {"hung query of DP ranks", "", 5}, {"hung GET of a rank", "", 5},
}

func baseline(runs []string) error {
	if len(runs) == 0 {
		return fmt.Errorf("it never ran")
	}
	last := runs[len(runs)-1]
	for _, c := range cycles {
		n := numbers(last, c.scene+` longest gap: a loop that waits +([\d.]+) s, ours +([\d.]+) s; a newcomer's first token after +([\d.]+) s, ours +([\d.]+) s`)
		switch {
		case len(n) != 4:
			return fmt.Errorf("nothing of %s in %q", c.scene, last)
		case n[0] < c.cycle-0.1 || n[0] > c.cycle+2 || n[1] > 1:
			return fmt.Errorf("%s: a loop that waits is silent for %v s, want %v; ours for %v s", c.scene, n[0], c.cycle, n[1])
		case n[2] > 0 && n[2] < 4 || n[3] == 0 || n[3] > 1: // 0: none came while somebody looked
			return fmt.Errorf("%s: a newcomer waits %v s, ours %v s", c.scene, n[2], n[3])
		}
	}
	return nil
}

func compared(runs []string) error {
	if len(runs) == 0 {
		return fmt.Errorf("it never ran")
	}
	last := runs[len(runs)-1]
	for _, c := range cycles[:3] {
		old := numbers(last, `(?:^|\| )`+c.hung+`, fetches on the loop, ([\d.]+)s, (\d+),`)
		ours := numbers(last, `(?:^|\| )`+c.hung+`, Metronome, ([\d.]+)ms, (\d+),`)
		if len(old) != 2 || len(ours) != 2 || old[0] < c.cycle || old[0] > c.cycle+0.1 || old[1] < 2 || ours[0] > 30 || ours[1] != 0 {
			return fmt.Errorf("%s: a loop that waits %v (s, gaps), ours %v (ms, gaps)", c.scene, old, ours)
		}
	}
	return nil
}
