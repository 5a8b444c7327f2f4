using System;
using System.Diagnostics;
using System.IO;
using System.Text;
using System.Threading;

namespace Tidemill
{
    /// <summary>
    /// The trainer's process. A Tidemill trainer holds a lock on the file PATH.trainer for as long as it lives, whatever ends it, and wakes who sleeps on the
    /// turn; a simulator that knows that says so by PATH.simulator. Of another trainer only its being the parent process can be known, if it is.
    /// </summary>
    internal sealed class Trainer : IDisposable
    {
        private readonly string mark; // PATH.simulator
        private readonly string trainerMark; // PATH.trainer
        private readonly int parent = Native.Parent();
        private readonly bool isParent;
        private int trainerLock = -1;
        private int ownLock = -1;
        private bool announced;

        /// <summary>Whether it wakes this process at each hand-over.</summary>
        public bool Wakes { get; }

        public Trainer(string path, bool isParent)
        {
            this.isParent = isParent;
            mark = path + ".simulator";
            trainerMark = path + ".trainer";
            Wakes = File.Exists(trainerMark);
            trainerLock = Wakes ? Native.OpenForLock(trainerMark) : -1;
        }

        /// <summary>Say that this simulator is there, and that it wakes the trainer. Another one that is there is an error.</summary>
        public void Announce()
        {
            if (!Wakes)
            {
                return;
            }
            for (int attempt = 0; !TryAnnounce(); attempt++)
            {
                if (attempt == 3)
                {
                    throw new BridgeException("Another simulator has joined this trainer (" + mark + " is locked). End it, or start a trainer of its own for this one.");
                }
                Thread.Sleep(10); // others hold the lock for an instant when they look whether its owner lives
            }
        }

        /// <summary>Whether a living simulator has joined it.</summary>
        public bool Taken
        {
            get
            {
                int other = Wakes && File.Exists(mark) ? Native.OpenForLock(mark) : -1;
                bool taken = other >= 0 && !Native.TryLock(other, false);
                Native.CloseLock(other);
                return taken;
            }
        }

        private bool TryAnnounce()
        {
            FileStream stream;
            try
            {
                stream = new FileStream(mark, FileMode.CreateNew, FileAccess.Write, FileShare.ReadWrite | FileShare.Delete, 1);
            }
            catch (IOException) when (File.Exists(mark))
            {
                int old = Native.OpenForLock(mark);
                if (old < 0 || Native.TryLock(old, true))
                {
                    Mapping.Remove(mark); // its owner has died
                }
                Native.CloseLock(old);
                return false;
            }
            catch (Exception error) when (error is IOException || error is UnauthorizedAccessException)
            {
                throw new BridgeException("The file " + mark + " cannot be made: " + error.Message, error);
            }
            try
            {
                using (stream)
                {
                    Native.KeepPrivate(mark);
                    ownLock = Native.OpenForLock(mark);
                    if (ownLock >= 0 && !Native.TryLock(ownLock, true))
                    {
                        ReleaseOwn();
                        return false;
                    }
                    byte[] text = Encoding.ASCII.GetBytes(Process.GetCurrentProcess().Id + "\n");
                    stream.Write(text, 0, text.Length); // whoever finds it empty knows that the lock is just being taken
                }
                return announced = true;
            }
            catch (IOException error)
            {
                ReleaseOwn();
                Mapping.Remove(mark);
                throw new BridgeException("The file " + mark + " cannot be written: " + error.Message + " " + Mapping.Room, error);
            }
        }

        private void ReleaseOwn()
        {
            Native.CloseLock(ownLock);
            ownLock = -1;
        }

        public bool Alive()
        {
            if (trainerLock >= 0)
            {
                if (!Native.TryLock(trainerLock, false))
                {
                    return true;
                }
                Native.Unlock(trainerLock);
                return false;
            }
            return Wakes ? NamedProcessLives() : !isParent || Native.Parent() == parent;
        }

        /// <summary>Where files cannot be locked: whether the process whose number the trainer wrote is there.</summary>
        private bool NamedProcessLives()
        {
            try
            {
                int number;
                if (!int.TryParse(File.ReadAllText(trainerMark).Trim(), out number))
                {
                    return true; // still being written
                }
                using (Process process = Process.GetProcessById(number))
                {
                    return !process.HasExited;
                }
            }
            catch (Exception error) when (error is ArgumentException || error is FileNotFoundException || error is InvalidOperationException)
            {
                return false;
            }
            catch (IOException)
            {
                return true;
            }
        }

        /// <summary>Whether the trainer removes the memory files itself when it closes.</summary>
        public bool Tidies { get { return Wakes; } }

        /// <summary>Remove what a trainer that died has left: its files and their folder, where it made one of its own. Elsewhere the next trainer does it.</summary>
        public void RemoveDead()
        {
            string folder = Path.GetDirectoryName(mark);
            if (!Path.GetFileName(folder).StartsWith("tidemill-", StringComparison.Ordinal))
            {
                return;
            }
            try
            {
                string first = Path.GetFileName(mark.Substring(0, mark.Length - ".simulator".Length));
                foreach (string path in Directory.GetFiles(folder, first + "*"))
                {
                    string rest = Path.GetFileName(path).Substring(first.Length);
                    if (rest.Trim('_').Length == 0 || rest == ".simulator" || rest == ".trainer" || rest == ".new")
                    {
                        File.Delete(path);
                    }
                }
                Directory.Delete(folder); // which stays where anything else is in it: it was somebody's then
            }
            catch (Exception error) when (error is IOException || error is UnauthorizedAccessException)
            {
                // The next trainer tries again.
            }
        }

        public void Dispose()
        {
            if (announced)
            {
                Mapping.Remove(mark);
            }
            Native.CloseLock(trainerLock);
            trainerLock = -1;
            ReleaseOwn();
        }
    }
}
