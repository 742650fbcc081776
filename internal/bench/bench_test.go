package bench

import "testing"

func TestRate(t *testing.T) {
	for _, c := range []struct {
		rounds []float64
		want   Rate
	}{
		{[]float64{3}, Rate{3, 3, 3}},
		{[]float64{9, 1, 4}, Rate{4, 1, 9}},
		{[]float64{9, 1, 4, 6}, Rate{5, 1, 9}},
	} {
		if got := rate(c.rounds); got != c.want {
			t.Errorf("rate(%v) = %v, want %v", c.rounds, got, c.want)
		}
	}
}

func TestTidy(t *testing.T) {
	for x, want := range map[float64]float64{0: 0, 0.0123456: 0.01235, 1.23456: 1.235, 123.456: 123.5, 1234567: 1235000, -5.00049: -5} {
		if got := tidy(x); got != want {
			t.Errorf("tidy(%v) = %v, want %v", x, got, want)
		}
	}
}

// The portable reader sees every byte, as the others must: else a stream would be measured that was not read.
func TestReaders(t *testing.T) {
	for _, read := range []func(*byte, int) uint64{best().read, readWords} {
		for at := range 512 {
			var b [512]byte
			b[at] = 1
			if read == nil || read(&b[0], len(b)) == 0 && at%64 < 8 {
				t.Fatalf("byte %d was not read", at)
			}
		}
	}
}
