package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Size is a number of bytes, written like 512MiB, 64KiB, 1GiB or 4096.
type Size int64

var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}, {"B", 1}}

// UnmarshalText parses a size.
func (s *Size) UnmarshalText(text []byte) error {
	t, mul := strings.TrimSpace(string(text)), int64(1)
	for _, u := range units {
		if rest, ok := strings.CutSuffix(t, u.name); ok {
			t, mul = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	n, err := strconv.ParseFloat(t, 64)
	if err != nil || !(n >= 0) || n*float64(mul) > math.MaxInt64/2 {
		return fmt.Errorf("%q is not a size; write it like 512MiB", text)
	}
	*s = Size(n * float64(mul))
	return nil
}

func (s Size) String() string {
	for _, u := range units[:4] {
		if int64(s) >= u.bytes && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10) + "B"
}

// Percent is a share, written like 50%.
type Percent float64

// UnmarshalText parses a share from 0% to 100%.
func (p *Percent) UnmarshalText(text []byte) error {
	n, err := strconv.ParseFloat(strings.TrimSuffix(string(text), "%"), 64)
	if err != nil || !(n >= 0 && n <= 100) {
		return fmt.Errorf("%q is not a share; write it like 50%%", text)
	}
	*p = Percent(n / 100)
	return nil
}

func (p Percent) String() string { return strconv.FormatFloat(float64(p)*100, 'g', -1, 64) + "%" }
