package known

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"mime"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Bounds of a download. There is none on its whole time: a slow line is no
// fault as long as it moves.
const (
	patience     = 30 * time.Second // in which leastBytes must come, from the first byte of the request on
	leastBytes   = 32 << 10
	maxTries     = 5         // in a row without progress
	leastGain    = 256 << 10 // bytes that count as progress
	firstPause   = time.Second
	maxIndexPage = 16 << 20
	maxRedirects = 5
)

var errStalled = fmt.Errorf("fewer than %d bytes in %s", leastBytes, patience)

// finalError is one that another try would meet again.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

func finalf(format string, args ...any) error { return finalError{fmt.Errorf(format, args...)} }

// isFinal says that another try would end the same way: what this package says
// so of, a server that cannot prove its name, and a name that nobody has.
func isFinal(err error) bool {
	var final finalError
	var cert *tls.CertificateVerificationError
	var dns *net.DNSError
	return errors.As(err, &final) || errors.As(err, &cert) || errors.As(err, &dns) && dns.IsNotFound
}

type client struct{ http http.Client }

func newClient(t http.RoundTripper) *client {
	return &client{http.Client{Transport: t, CheckRedirect: func(r *http.Request, via []*http.Request) error {
		if len(via) > maxRedirects {
			return finalf("more than %d redirects", maxRedirects)
		}
		return checkURL(r.URL)
	}}}
}

// checkURL wants https; a server on this machine may do without.
func checkURL(u *url.URL) error {
	ip := net.ParseIP(u.Hostname())
	here := u.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
	if u.Host == "" || u.Scheme != "https" && !(u.Scheme == "http" && here) {
		return finalf("%s: an https URL would be right", u.Redacted())
	}
	return nil
}

// persist repeats a request that failed for a reason that may pass. gained says
// how far the work has come, in bytes.
func persist(ctx context.Context, gained func() int64, once func() error) error {
	best, failed := int64(0), 0
	for {
		err := once()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err == nil || isFinal(err) {
			return err
		}
		if at := gained(); at >= best+leastGain {
			best, failed = at, 0
		}
		if failed++; failed == maxTries {
			return fmt.Errorf("gave up after %d tries in a row without progress: %w", maxTries, err)
		}
		select {
		case <-time.After(firstPause << (failed - 1)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// request sends one GET and hands the answer to read. It ends with errStalled
// when less than leastBytes come within patience, whatever the server does.
func (c *client) request(ctx context.Context, at *url.URL, header http.Header, read func(*http.Response, io.Reader) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(patience, func() { cancel(errStalled) }) // it only cancels
	defer watch.Stop()
	req, err := http.NewRequestWithContext(ctx, "GET", at.String(), nil)
	if err != nil {
		return finalError{err}
	}
	req.Header = header
	req.Header.Set("Accept-Encoding", "identity") // sizes and ranges are of the bytes themselves
	req.Header.Set("User-Agent", "metronome")
	resp, err := c.http.Do(req)
	if err == nil {
		defer resp.Body.Close()
		err = read(resp, &movingReader{from: resp.Body, watch: watch})
	}
	if err != nil && errors.Is(context.Cause(ctx), errStalled) {
		return fmt.Errorf("%s: %w", at.Redacted(), errStalled)
	}
	return err
}

// movingReader winds the watch whenever enough has come.
type movingReader struct {
	from  io.Reader
	watch *time.Timer
	n     int
}

func (r *movingReader) Read(b []byte) (int, error) {
	n, err := r.from.Read(b)
	if r.n += n; r.n >= leastBytes {
		r.watch.Reset(patience)
		r.n = 0
	}
	return n, err
}

// status turns an answer that is not the one hoped for into an error.
func status(resp *http.Response) error {
	err := fmt.Errorf("%s answers %s", resp.Request.URL.Redacted(), resp.Status)
	if s := resp.StatusCode; s >= 500 || s == http.StatusTooManyRequests || s == http.StatusRequestTimeout {
		return err
	}
	return finalError{err}
}

// findWheel asks an index for the URL of one file of a package.
func (c *client) findWheel(ctx context.Context, index, pkg, file string) (*url.URL, error) {
	base, err := url.Parse(strings.TrimSuffix(index, "/") + "/" + pkg + "/")
	if err != nil {
		return nil, fmt.Errorf("index: an https URL would be right (%w)", errors.Unwrap(err))
	}
	if err := checkURL(base); err != nil {
		return nil, err
	}
	var found *url.URL
	err = persist(ctx, func() int64 { return 0 }, func() error {
		accept := http.Header{"Accept": {"application/vnd.pypi.simple.v1+json, text/html;q=0.1"}}
		return c.request(ctx, base, accept, func(resp *http.Response, body io.Reader) error {
			if resp.StatusCode != http.StatusOK {
				return status(resp)
			}
			page, err := io.ReadAll(io.LimitReader(body, maxIndexPage+1))
			if err != nil {
				return err
			}
			if len(page) > maxIndexPage {
				return finalf("%s: a page of more than %d bytes", base.Redacted(), maxIndexPage)
			}
			ref, err := wheelRef(resp.Header.Get("Content-Type"), page, file)
			if err != nil {
				return finalf("%s: %w", base.Redacted(), err)
			}
			found, err = resp.Request.URL.Parse(ref)
			if err != nil {
				return finalf("%s: a URL that cannot be read for %s", base.Redacted(), file)
			}
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if found.Host == base.Host && found.User == nil {
		found.User = base.User
	}
	found.Fragment = ""
	return found, checkURL(found)
}

var anchor = regexp.MustCompile(`(?is)<a\s[^>]*?\bhref\s*=\s*["']([^"']*)["'][^>]*>([^<]*)</a>`)

// wheelRef finds the reference to a file in an index's page: JSON (PEP 691) or
// HTML (PEP 503).
func wheelRef(contentType string, page []byte, file string) (string, error) {
	kind, _, _ := mime.ParseMediaType(contentType)
	if strings.HasSuffix(kind, "json") {
		var list struct {
			Files []struct{ Filename, URL string }
		}
		if err := json.Unmarshal(page, &list); err != nil {
			return "", err
		}
		for _, f := range list.Files {
			if f.Filename == file {
				return f.URL, nil
			}
		}
	} else {
		for _, a := range anchor.FindAllSubmatch(page, -1) {
			if strings.TrimSpace(html.UnescapeString(string(a[2]))) == file {
				return html.UnescapeString(string(a[1])), nil
			}
		}
	}
	return "", fmt.Errorf("this index has no %s", file)
}

// download brings a wheel into the file at path, going on where an earlier try
// ended. When it returns nil the file is the pinned one; a file that is not, is
// removed.
func (c *client) download(ctx context.Context, at *url.URL, path string, w Wheel, progress func(done, total int64)) error {
	part, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer part.Close()
	d := &partial{client: c, at: at, part: part, wheel: w, progress: progress}
	d.pieces = d.size() > 0
	for whole := false; ; whole = true {
		if err := persist(ctx, d.size, func() error { return d.try(ctx) }); err != nil {
			return err
		}
		err := checkFile(path, w.SHA256)
		if err == nil {
			return nil
		}
		if whole || !d.pieces {
			return errors.Join(err, part.Close(), os.Remove(path))
		}
		// Pieces of different files: once more, in one piece.
		if err := part.Truncate(0); err != nil {
			return err
		}
		d.inOne = true
	}
}

// partial is a download between its tries.
type partial struct {
	client   *client
	at       *url.URL
	part     *os.File
	wheel    Wheel
	progress func(done, total int64)
	etag     string // of the last bytes in part, if this run brought them
	pieces   bool   // part is made of several answers
	inOne    bool   // no more of that
}

// size is how much is here.
func (d *partial) size() int64 {
	n, err := d.part.Seek(0, io.SeekEnd)
	if err != nil {
		return 0
	}
	return n
}

// try asks once for what is missing.
func (d *partial) try(ctx context.Context) error {
	have := d.size()
	if have > d.wheel.Size || d.inOne && have < d.wheel.Size {
		have = 0
	}
	if have == d.wheel.Size {
		return nil
	}
	header := http.Header{}
	if have > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-", have))
		if d.etag != "" {
			header.Set("If-Range", d.etag)
		}
	}
	return d.client.request(ctx, d.at, header, func(resp *http.Response, body io.Reader) error {
		from, err := d.judge(resp, have)
		if err != nil {
			return err
		}
		if err := d.part.Truncate(from); err != nil {
			return finalError{err}
		}
		if d.etag = resp.Header.Get("ETag"); strings.HasPrefix(d.etag, "W/") {
			d.etag = "" // too weak to put pieces together by
		}
		d.pieces = from > 0
		return d.take(body, from)
	})
}

// judge decides at which offset an answer's bytes belong.
func (d *partial) judge(resp *http.Response, have int64) (from int64, err error) {
	switch resp.StatusCode {
	case http.StatusOK: // from the start, also if a range was asked for
	case http.StatusPartialContent:
		start, total, err := contentRange(resp.Header.Get("Content-Range"))
		if err != nil || start != have {
			d.inOne = true
			return 0, fmt.Errorf("%s answers with the range %q, not what was asked for", d.at.Redacted(), resp.Header.Get("Content-Range"))
		}
		if total != d.wheel.Size {
			return 0, finalf("%s has %d bytes, %d would be right", d.at.Redacted(), total, d.wheel.Size)
		}
		from = start
	case http.StatusRequestedRangeNotSatisfiable:
		d.inOne = true
		return 0, status(resp).(finalError).error
	default:
		return 0, status(resp)
	}
	if n := resp.ContentLength; n >= 0 && from+n != d.wheel.Size {
		return 0, finalf("%s has %d bytes, %d would be right", d.at.Redacted(), from+n, d.wheel.Size)
	}
	return from, nil
}

// take appends an answer's bytes to the part, never more than belong there.
func (d *partial) take(body io.Reader, at int64) error {
	buf := make([]byte, 256<<10)
	for {
		n, err := body.Read(buf)
		if int64(n) > d.wheel.Size-at {
			return finalf("%s sends more than %d bytes", d.at.Redacted(), d.wheel.Size)
		}
		if _, err := d.part.WriteAt(buf[:n], at); err != nil {
			return finalError{err}
		}
		at += int64(n)
		if d.progress != nil {
			d.progress(at, d.wheel.Size)
		}
		switch {
		case err == io.EOF && at == d.wheel.Size:
			return nil
		case err == io.EOF:
			return io.ErrUnexpectedEOF
		case err != nil:
			return err
		}
	}
}

var rangeForm = regexp.MustCompile(`^bytes (\d{1,18})-(\d{1,18})/(\d{1,18})$`)

func contentRange(s string) (start, total int64, err error) {
	m := rangeForm.FindStringSubmatch(s)
	if m == nil {
		return 0, 0, fmt.Errorf("%q is no range", s)
	}
	start, _ = strconv.ParseInt(m[1], 10, 64) // the form bounds it
	total, _ = strconv.ParseInt(m[3], 10, 64)
	return start, total, nil
}
