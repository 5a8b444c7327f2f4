using System;
using System.Diagnostics;
using System.Threading;

namespace Tidemill
{
    /// <summary>
    /// Waits for the turn: a short spin where that mostly pays, then sleep until the trainer wakes this process, or naps where it wakes nobody. Between
    /// sleeps it looks whether the trainer lives.
    /// </summary>
    internal sealed class Turns
    {
        private const long SpinTime = 300; // microseconds
        private const int MostTrust = 16;
        private const int Fee = 8; // a spin that did not pay costs so much of the trust that each one that did adds 1 to
        private const int RarestTrial = 4096; // without trust one is tried after so many waits at most
        private const long ShortestNap = 50000; // nanoseconds
        private const long LongestNap = 1000000;
        private const long Look = 200000000;

        private static readonly long TicksPerMicrosecond = Math.Max(1, Stopwatch.Frequency / 1000000);

        private int trust = MostTrust; // that spinning pays
        private int untilTrial = 64;
        private int trialPause = 64;

        /// <summary>Return once it is the simulator's turn (true), or the trainer's process has ended (false).</summary>
        public bool Wait(Image image, Trainer trainer, TimeSpan? deadline)
        {
            return image.Mine || Spin(image) || Sleep(image, trainer, deadline);
        }

        private bool Spin(Image image)
        {
            if (Environment.ProcessorCount == 1)
            {
                return false;
            }
            if (trust == 0)
            {
                if (--untilTrial > 0)
                {
                    return false;
                }
                untilTrial = trialPause = Math.Min(2 * trialPause, RarestTrial);
            }
            long end = Stopwatch.GetTimestamp() + SpinTime * TicksPerMicrosecond;
            do
            {
                for (int i = 0; i < 8; i++)
                {
                    if (image.Mine)
                    {
                        trust = Math.Min(trust + 1, MostTrust);
                        untilTrial = trialPause = 64;
                        return true;
                    }
                }
            }
            while (Stopwatch.GetTimestamp() < end);
            trust = Math.Max(trust - Fee, 0);
            return false;
        }

        private static bool Sleep(Image image, Trainer trainer, TimeSpan? deadline)
        {
            long nap = ShortestNap;
            Stopwatch waited = Stopwatch.StartNew();
            long nextLook = 0; // ms
            while (true)
            {
                int seen = image.TurnValue;
                if (image.IsMine(seen))
                {
                    Thread.MemoryBarrier(); // what is read next was written before the turn
                    return true;
                }
                long milliseconds = waited.ElapsedMilliseconds;
                if (milliseconds >= nextLook)
                {
                    nextLook = milliseconds + Look / 1000000;
                    if (!trainer.Alive())
                    {
                        return image.Mine; // what it handed over before it ended still counts
                    }
                    if (deadline.HasValue && milliseconds > deadline.Value.TotalMilliseconds)
                    {
                        throw new DeadlineException("The trainer has not answered for " + deadline.Value.TotalSeconds + " s, the deadline that was set.");
                    }
                }
                if (Native.HasFutex)
                {
                    Native.Sleep(image.TurnWord, seen, trainer.Wakes ? Look : nap);
                }
                else
                {
                    Thread.Sleep(1);
                }
                nap = Math.Min(nap + nap / 2, LongestNap);
            }
        }
    }
}
