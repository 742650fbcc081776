package engine

import (
	"math"

	"github.com/metronome-serve/metronome/internal/engine/kernels"
	"github.com/metronome-serve/metronome/internal/model"
)

// rotation is the angle of each pair for one position, and what cosines and
// sines are multiplied with. factors is empty or has a divisor for each pair.
func rotation(r *model.Rope, factors []float32) (freqs []float64, magnitude float64) {
	freqs, magnitude = make([]float64, r.Dim/2), 1
	log, scale := kernels.Log64(float64(r.Theta)), float64(r.Scale)
	low, high := 0.0, 0.0
	if r.YaRN.Context > 0 {
		// The pair that turns n times within the context before it was stretched.
		pair := func(n float32) float64 {
			turns := float64(float64(n) * (2 * math.Pi))
			return float64(float64(r.Dim)*kernels.Log64(float64(r.YaRN.Context)/turns)) / float64(2*log)
		}
		low, high = max(0, math.Floor(pair(r.YaRN.Fast))), min(float64(r.Dim-1), -math.Floor(-pair(r.YaRN.Slow)))
		magnitude = 1 + float64(kernels.Log64(scale)/10)
	}
	for i := range freqs {
		freq := kernels.Exp64(float64(-2 * float64(i) / float64(r.Dim) * log))
		if len(factors) > 0 {
			freq /= float64(factors[i])
		}
		freqs[i] = freq / scale
		if r.YaRN.Context > 0 {
			ramp := min(1, max(0, (float64(i)-low)/max(0.001, high-low))) // 0: fast, as it was
			freqs[i] = float64(freqs[i]*ramp) + float64(freq*(1-ramp))
		}
	}
	return freqs, magnitude
}
