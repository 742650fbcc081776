package model

import "testing"

func TestBuiltin(t *testing.T) {
	f, err := OpenBytes("tiny", Builtin())
	if err != nil {
		t.Fatal(err)
	}
	h, err := f.Hyper()
	if err != nil {
		t.Fatal(err)
	}
	want := Hyper{Layers: 4, Dim: 256, Heads: 8, KVHeads: 4, HeadDim: 32, FF: 512, Vocab: 2048, Context: 1024, RopeDim: 32, RopeTheta: 10000, Eps: 1e-5, Tied: true}
	if h != want {
		t.Errorf("hyper parameters %+v, want %+v", h, want)
	}
	if n := f.Parameters(); n != 2885888 {
		t.Errorf("%d parameters", n)
	}
	if q := f.Quantisation(); q != "Q8_0" {
		t.Errorf("quantisation %s", q)
	}
}
