using System;
using System.Diagnostics;
using System.IO;
using System.Text;

namespace Tidemill
{
    /// <summary>
    /// The trainer's process. A Tidemill trainer holds a lock on the file PATH.trainer for as long as it lives, whatever ends it, and wakes who sleeps on the
    /// turn; a simulator that knows that says so by PATH.simulator. Of another trainer only its being the parent process can be known.
    /// </summary>
    internal sealed class Trainer : IDisposable
    {
        private readonly string mark; // PATH.simulator
        private readonly string trainerMark; // PATH.trainer
        private readonly int parent = Native.Parent();
        private int trainerLock = -1;
        private int ownLock = -1;

        /// <summary>Whether it wakes this process at each hand-over.</summary>
        public bool Wakes { get; }

        public Trainer(string path)
        {
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
            try
            {
                using (var stream = new FileStream(mark, FileMode.CreateNew, FileAccess.Write, FileShare.ReadWrite | FileShare.Delete))
                {
                    Native.KeepPrivate(mark);
                    byte[] text = Encoding.ASCII.GetBytes(Process.GetCurrentProcess().Id + "\n");
                    stream.Write(text, 0, text.Length);
                }
            }
            catch (IOException) when (File.Exists(mark))
            {
                // Left by one that died, or held by one that lives: the lock tells.
            }
            ownLock = Native.OpenForLock(mark);
            if (ownLock >= 0 && !Native.TryLock(ownLock, true))
            {
                Native.CloseLock(ownLock);
                ownLock = -1;
                throw new BridgeException("Another simulator is connected to this trainer (" + mark + " is locked). End it, or start a trainer of its own for this one.");
            }
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
            return Wakes ? NamedProcessLives() : Native.Parent() == parent;
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

        /// <summary>Remove this simulator's mark and, where the trainer has ended, the trainer's.</summary>
        public void Remove(bool ended)
        {
            if (ownLock >= 0 || (Wakes && ended))
            {
                Mapping.Remove(mark);
            }
            if (Wakes && ended)
            {
                Mapping.Remove(trainerMark);
            }
        }

        public void Dispose()
        {
            Native.CloseLock(trainerLock);
            Native.CloseLock(ownLock);
            trainerLock = ownLock = -1;
        }
    }
}
